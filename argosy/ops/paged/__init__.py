"""Attention over paged caches: the op, and an implementation for each kind of device."""
