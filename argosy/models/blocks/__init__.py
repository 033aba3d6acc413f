"""Modules that a single family uses. The family's file in `models` has the equations; that file does not import jax."""
