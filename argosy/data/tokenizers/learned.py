"""Learned tokens beside a vocabulary (textual inversion): names in a text that stand for rows of their own.

As added tokens do in transformers, they part a text, within words too; capitals make no difference, and of two names that match the
longer one is read. Gal et al. 2022 (arXiv:2208.01618).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any


class LearnedTokens:
    """The ids that names stand for.

    Args:
        ids: of each token, by its name as it is written.
    """

    def __init__(self, ids: Mapping[str, Sequence[int]]):
        self.ids = {token: list(rows) for token, rows in ids.items()}
        # By the names as they are written: "İ" is two letters in lower case, and "ſ" matches "s".
        self.names = sorted(self.ids, key=len, reverse=True)
        self._parts = re.compile(f"({'|'.join(map(re.escape, self.names))})", re.IGNORECASE)

    def encode(self, tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text. The name of a special token is that token."""
        if not self.ids:
            return tokenizer.encode_many(list(texts), special=True)
        parts = [self._parts.split(text) for text in texts]
        plain = iter(tokenizer.encode_many([part for text_parts in parts for part in text_parts[::2]], special=True))
        encoded = []
        for text_parts in parts:
            ids: list[int] = []
            for i, part in enumerate(text_parts):
                ids += self._rows(part) if i % 2 else next(plain)
            encoded.append(ids)
        return encoded

    def _rows(self, match: str) -> list[int]:
        """The ids of the token that a part of a text names."""
        token = next(name for name in self.names if re.fullmatch(re.escape(name), match, re.IGNORECASE))
        return self.ids[token]
