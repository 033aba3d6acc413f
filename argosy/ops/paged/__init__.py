"""Attention over paged KV caches: the op, and implementations for each kind of device."""
