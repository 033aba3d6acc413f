"""Blocks used by a single family. The family's file, which does not import jax, describes them and has their equations."""
