"""Runs that exist: list, show, compare and report them."""
