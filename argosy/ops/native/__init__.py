"""Compiled kernels for CPUs: `kernels.cc`, the code that builds it, and the ops that call it."""
