"""A tokenizer with one token for each of the 256 bytes, and `<bos>` and `<eos>`. It needs no file and no library.

It is saved as a tokenizer.json that gives the same ids, so other programs can read an exported model.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from argosy.data.tokenizers import Span, Tokenizer, well_formed
from argosy.data.tokenizers.config import TokenizerConfig

BOS, EOS = "<bos>", "<eos>"
NAMES = {BOS: 256, EOS: 257}


class ByteTokenizer(Tokenizer):
    """A tokenizer whose ids are UTF-8 bytes."""

    vocab, bos, eos = 258, 256, 257
    hidden = frozenset(NAMES.values())

    def __init__(self, config: TokenizerConfig | None = None) -> None:
        """config: the configuration of a saved tokenizer, such as its chat templates; None: the default."""
        super().__init__((config or TokenizerConfig()).filled({"bos_token": BOS, "eos_token": EOS}))
        self.adds_bos = bool(self.config.adds_bos)

    def identity(self) -> bytes:
        return b"argosy: 256 bytes, <bos>, <eos>"

    def encode(self, text: str, special: bool = False) -> list[int]:
        if not special:
            return list(well_formed(text).encode())
        parts = re.split(f"({'|'.join(NAMES)})", text)
        return [token for part in parts for token in ([NAMES[part]] if part in NAMES else self.encode(part))]

    def encode_with_offsets(self, text: str, special: bool = False, rest: bool = False) -> tuple[list[int], list[Span]]:
        ids, spans, at = [], [], 0
        for part in re.split(f"({'|'.join(NAMES)})", well_formed(text)) if special else [well_formed(text)]:
            units = [part] if special and part in NAMES else part
            for unit in units:
                tokens = self.encode(unit, special)
                ids += tokens
                spans += [(at, at + len(unit))] * len(tokens)
                at += len(unit)
        return ids, spans

    def piece(self, token: int, first: bool) -> bytes:
        if 0 <= token < 256:
            return bytes([token])
        return next((name.encode() for name, number in NAMES.items() if number == token), b"")

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        if skip_special:
            return bytes(token for token in ids if 0 <= token < 256).decode("utf-8", self.invalid)
        return super().decode(ids, skip_special)

    def save(self, folder: str | Path) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
        self.config.save(folder, self.adds_bos)


def tokenizer_json() -> str:
    """The tokenizer.json of a byte-level BPE without merges, which gives the same ids (format of huggingface/tokenizers)."""
    alphabet = byte_names()
    added = [
        {"id": number, "content": name, "special": True} | dict.fromkeys(
            ("single_word", "lstrip", "rstrip", "normalized"), False
        )
        for name, number in NAMES.items()
    ]  # fmt: skip
    split = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": {alphabet[byte]: byte for byte in range(256)} | NAMES, "merges": []}
    content = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": split, "post_processor": None, "decoder": split, "model": model,
    }  # fmt: skip
    return json.dumps(content, indent=1, ensure_ascii=False)


def byte_names() -> dict[int, str]:
    """The character that byte-level vocabularies write for each byte: the character itself if it is printable, else one from U+0100
    on (openai/gpt-2, encoder.py)."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    return {byte: chr(byte) for byte in printing} | {byte: chr(256 + place) for place, byte in enumerate(others)}
