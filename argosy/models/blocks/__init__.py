"""Blocks that one family alone has; its file, without jax, describes them and holds their equations."""
