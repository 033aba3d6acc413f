"""Buckets of sizes."""


def next_power_of_two(size: int) -> int:
    """The least power of two that is at least this size."""
    return 1 << max(size - 1, 0).bit_length()
