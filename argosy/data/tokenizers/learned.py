"""Encodes texts with learned tokens of textual inversion: names that stand for additional rows of the embedding.

Like added tokens in transformers, the names are found anywhere in a text, also within words. Upper and lower case are equal. Of two
names that match, the longer one is used. Gal et al. 2022 (arXiv:2208.01618).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any


class LearnedTokens:
    """Names of learned tokens, and their ids.

    Args:
        ids: the ids of each learned token, by its name.
    """

    def __init__(self, ids: Mapping[str, Sequence[int]]):
        self.ids = {token: list(rows) for token, rows in ids.items()}
        # Names are not lower-cased, because "İ" is two letters in lower case, and "ſ" matches "s".
        self.names = sorted(self.ids, key=len, reverse=True)
        self._parts = re.compile(f"({'|'.join(map(re.escape, self.names))})", re.IGNORECASE)

    def encode(self, tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
        """Encodes texts. Names of special tokens become those tokens."""
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
        """The ids of the learned token whose name was matched."""
        token = next(name for name in self.names if re.fullmatch(re.escape(name), match, re.IGNORECASE))
        return self.ids[token]
