"""Continuous batching: scheduler, pages, programs, and the engine that steps them."""
