"""Counts with their nouns, as people read them."""


def plural(count: int, noun: str, singular: str = "", multiple: str = "") -> str:
    """`1 row`, `1,024 rows`. singular, multiple: the verb of each: `1 row is`, `2 rows are`."""
    verb = singular if count == 1 else multiple
    return f"{count:,} {noun}{'' if count == 1 else 's'}{' ' if verb else ''}{verb}"
