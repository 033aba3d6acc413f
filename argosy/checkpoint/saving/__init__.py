"""Saving while training goes on: host memory for the copies, and the speed of writing."""
