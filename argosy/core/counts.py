"""Writes counts with their nouns."""


def plural(count: int, noun: str, singular: str = "", multiple: str = "") -> str:
    """A count with its noun: `1 row`, `1,024 rows`.

    Args:
        singular, multiple: the verb to add for one and for several: `1 row is`, `2 rows are`.
    """
    verb = singular if count == 1 else multiple
    return f"{count:,} {noun}{'' if count == 1 else 's'}{' ' if verb else ''}{verb}"
