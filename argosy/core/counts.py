"""Counts with their nouns, as people read them."""


def plural(count: int, noun: str, one: str = "", many: str = "") -> str:
    """`1 row`, `1,024 rows`. one, many: the verb of each: `1 row is`, `2 rows are`."""
    verb = one if count == 1 else many
    return f"{count:,} {noun}{'' if count == 1 else 's'}{' ' if verb else ''}{verb}"
