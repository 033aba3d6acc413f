"""A save beside training."""
