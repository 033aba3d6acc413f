"""Attention: strategies that decide which queries see which keys, caches, rotary positions, and attention layers."""
