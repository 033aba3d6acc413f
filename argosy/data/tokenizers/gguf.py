"""Reads the tokenizer of a GGUF file: `llama` (SentencePiece), `gpt2` (byte-level BPE), or `bert` (WordPiece).

A GGUF file holds the tables of a tokenizer. They are converted back to the SentencePiece model or tokenizer.json that they came from.
Two things are missing in the tables: the pre-tokenizer's rule, of which they only have the name (`rules`), and the normalization of a
SentencePiece model, which is assumed to be that of Llama.

llama.cpp's converter (convert_hf_to_gguf.py) changes four things, which are undone here:

    `<unk>` becomes a control token if tokenizer_config.json calls it special; `unknown_token_id` still names it
    user-defined tokens of SentencePiece have real spaces, where the model has U+2581
    vocabularies that are smaller than the embedding are filled up with unused tokens `[PADn]`
    old converters, which knew no type for byte tokens, wrote `<0x0A>` as an ordinary token
"""

import re
from pathlib import Path
from typing import Any

import numpy as np

from argosy.core.errors import Unsupported
from argosy.core.formats.gguf import GGUF
from argosy.data.tokenizers import Tokenizer
from argosy.data.tokenizers.config import DEFAULT, TokenizerConfig, damaged_file_error
from argosy.data.tokenizers.convert import byte_bpe, from_word_pieces
from argosy.data.tokenizers.pieces import SPACE
from argosy.data.tokenizers.proto import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, write_model
from argosy.data.tokenizers.rules import rule

KEY = "tokenizer.ggml."
# llama.cpp's names, with its misspelling of one.
ROLES = {
    "bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token", "seperator": "sep_token",
    "cls": "cls_token", "mask": "mask_token",
}  # fmt: skip


def read_gguf(path: Path) -> Tokenizer | None:
    """Reads the tokenizer of a GGUF file; None: the file holds no tokenizer.

    Raises:
        BadInput: the pre-tokenizer's rule is not known.
        Damaged: the tables contradict each other.
        Unsupported: the tokenizer is of another kind.
    """
    meta = GGUF.open(path).meta
    kind = meta.get(f"{KEY}model")
    if kind is None or (isinstance(kind, str) and kind in ("none", "no_vocab")):
        return None
    if not isinstance(kind, str) or kind not in KINDS:
        raise Unsupported(f"the GGUF tokenizer `{str(kind)[:40]}` is not read", where=f"in {path}")
    return KINDS[kind](VocabularyTables(meta, path))


class VocabularyTables:
    """The tables of one file, checked against each other, without the unused filler tokens at the end.

    Raises:
        Damaged: a table is missing, of another length or of another type.
    """

    def __init__(self, meta: dict[str, Any], path: Path):
        self.meta, self.path = meta, path
        self.tokens: list[str] = self.texts("tokens")
        self.size = len(self.tokens)
        kinds = self.numbers("token_type", NORMAL)
        if not np.isin(kinds, range(BYTE + 1)).all():
            raise damaged_file_error(path, f"`{KEY}token_type` holds an unknown type")
        self.kinds: list[int] = np.where(kinds == 0, NORMAL, kinds).astype(int).tolist()  # 0: undefined
        if len(set(self.tokens)) < len(self.tokens):
            raise damaged_file_error(path, "a token stands twice")
        self.roles = self.role_ids()
        while self.is_filler(len(self.tokens) - 1):
            self.tokens.pop()
            self.kinds.pop()

    def is_filler(self, number: int) -> bool:
        """Whether an id is an unused filler `[PADn]`, which only stands for a row of the embedding."""
        unused = number > 0 and self.kinds[number] == UNUSED and number not in self.roles.values()
        return unused and re.fullmatch(r"\[PAD\d+\]", self.tokens[number]) is not None

    def texts(self, name: str) -> list[str]:
        value = self.meta.get(KEY + name)
        if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
            raise damaged_file_error(self.path, f"`{KEY}{name}` is not a list of texts")
        return value

    def numbers(self, name: str, missing: float) -> np.ndarray:
        value = self.meta.get(KEY + name, np.full(self.size, missing))
        if not isinstance(value, np.ndarray) or value.shape != (self.size,) or not np.isfinite(value).all():
            raise damaged_file_error(self.path, f"`{KEY}{name}` does not have one number for each token")
        return value[: len(self.tokens)]

    def switch(self, name: str, missing: bool) -> bool:
        return bool(self.meta.get(KEY + name, missing))

    def config(self, adds_bos: bool) -> TokenizerConfig:
        """The roles and the chat templates. `adds_bos` is used if the file does not say whether `bos` is added."""
        key = "tokenizer.chat_template"
        templates = {DEFAULT: self.meta[key]} if isinstance(self.meta.get(key), str) else {}
        templates |= {name[len(key) + 1 :]: text for name, text in self.meta.items() if name.startswith(f"{key}.")}
        templates = {name: text for name, text in templates.items() if isinstance(text, str)}
        roles = {role: self.tokens[number] for role, number in self.roles.items()}
        return TokenizerConfig(roles, self.switch("add_bos_token", adds_bos), templates)

    def role_ids(self) -> dict[str, int]:
        """The id of each special token in the file, by role."""
        ids = {role: self.meta.get(f"{KEY}{word}_token_id") for word, role in ROLES.items()}
        present = {role: number for role, number in ids.items() if isinstance(number, int)}
        if wrong := next((number for number in present.values() if not 0 <= number < self.size), None):
            raise damaged_file_error(self.path, f"the special token {wrong} is outside its {self.size} tokens")
        return present


def byte_level(tables: VocabularyTables) -> Tokenizer:
    """Makes a byte-level BPE from the tables of `gpt2`: tokens, merges, and the name of a rule."""
    from argosy.data.tokenizers.fast import FastTokenizer

    name = tables.meta.get(f"{KEY}pre", "default")
    bpe_rule = rule(str(name), f"`{KEY}pre` in {tables.path}")
    merges = [merge.split(" ", 1) for merge in tables.texts("merges")]
    if wrong := next((merge for merge in merges if len(merge) != 2), None):
        raise damaged_file_error(tables.path, f"the merge {wrong[0][:40]!r} is no pair")
    added = [
        {"id": number, "content": token, "special": kind != USER_DEFINED}
        for number, (token, kind) in enumerate(zip(tables.tokens, tables.kinds))
        if kind in (CONTROL, UNKNOWN, USER_DEFINED) and token
    ]
    vocab = {token: number for number, token in enumerate(tables.tokens)}
    return FastTokenizer(byte_bpe(vocab, merges, bpe_rule, added), tables.config(bpe_rule.bos), tables.path)


def sentence_pieces(tables: VocabularyTables) -> Tokenizer:
    """Makes a SentencePiece tokenizer from the tables of `llama`: tokens with scores and kinds."""
    from argosy.data.tokenizers.pieces import PieceTokenizer

    config = tables.config(adds_bos=True)
    scores = tables.numbers("scores", 0.0).astype(float).tolist()
    data = write_model(
        [(text, score, kind) for (text, kind), score in zip(model_pieces(tables), scores)],
        prefix=tables.switch("add_space_prefix", True),
        trims=tables.switch("remove_extra_whitespaces", False),
        bos=config.roles.get("bos_token"),
        eos=config.roles.get("eos_token"),
    )
    return PieceTokenizer(data, config, tables.path)


def model_pieces(tables: VocabularyTables) -> list[tuple[str, int]]:
    """The text and the kind of each piece, as in the SentencePiece model before llama.cpp's converter changed it.

    Raises:
        Damaged: there is not exactly one unknown token, or two pieces have the same text.
    """
    tokens, kinds = list(tables.tokens), list(tables.kinds)
    if UNKNOWN not in kinds:
        unknown = tables.roles.get("unk_token", tokens.index("<unk>") if "<unk>" in tokens else None)
        if unknown is not None:
            kinds[unknown] = UNKNOWN
    if kinds.count(UNKNOWN) != 1:
        raise damaged_file_error(tables.path, f"{kinds.count(UNKNOWN)} unknown tokens instead of one")
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    if BYTE not in kinds and set(names) <= set(tokens):
        bytes_ = set(names)
        kinds = [BYTE if token in bytes_ else kind for token, kind in zip(tokens, kinds)]
    spelt = [token.replace(" ", SPACE) if kind == USER_DEFINED else token for token, kind in zip(tokens, kinds)]
    if len(set(spelt)) < len(spelt):
        raise damaged_file_error(tables.path, "two tokens have the same text once spaces are written as U+2581")
    return list(zip(spelt, kinds))


def word_pieces(tables: VocabularyTables) -> Tokenizer:
    """Makes a WordPiece tokenizer from the tables of `bert`. They mark tokens that begin a word, while BERT's own file marks tokens
    that continue one."""
    from argosy.data.tokenizers.fast import FastTokenizer

    tokens = [
        token if token.startswith("[") and token.endswith("]")
        else token.removeprefix(SPACE) if token.startswith(SPACE) else f"##{token}"
        for token in tables.tokens
    ]  # fmt: skip
    return FastTokenizer(from_word_pieces(tokens, {}), tables.config(adds_bos=False), tables.path)


KINDS = {"gpt2": byte_level, "llama": sentence_pieces, "bert": word_pieces}
