"""Parts that only CPUs need: packed weights, and views of stacked layers."""
