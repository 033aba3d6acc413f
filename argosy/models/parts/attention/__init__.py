"""How queries meet keys, and what a layer keeps of the past: strategies, caches, rotary positions, heads."""
