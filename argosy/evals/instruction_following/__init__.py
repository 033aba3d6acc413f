"""Evaluates whether answers follow instructions that a program can check (IFEval)."""
