"""Compiled kernels for CPUs: `kernels.cc`, how it is built, and the ops that call it."""
