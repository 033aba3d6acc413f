"""Code for CPUs only: packed weights, and views of stacked layers."""
