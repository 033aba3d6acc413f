"""Rounding of sizes, so that similar sizes share a program."""


def next_power_of_two(size: int) -> int:
    """Returns the smallest power of two that is at least this size."""
    return 1 << max(size - 1, 0).bit_length()
