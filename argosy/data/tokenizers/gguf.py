"""The tokenizer inside a GGUF file: `llama` (SentencePiece), `gpt2` (byte-level BPE), `bert` (WordPiece).

Notable: a GGUF holds tables, not a tokenizer: the tables are written out as the SentencePiece model or tokenizer.json that
they came from, and read as those are. What the tables leave out is the pre-tokenizer's rule, known by its name (`rules`),
and how a SentencePiece model normalizes, taken to be Llama's way.
"""

from pathlib import Path
from typing import Any

import numpy as np

from argosy.core.errors import Unsupported
from argosy.core.formats.gguf import GGUF
from argosy.data.tokenizers import Tokenizer
from argosy.data.tokenizers.convert import byte_bpe, from_word_pieces
from argosy.data.tokenizers.facts import DEFAULT, Facts, damaged
from argosy.data.tokenizers.pieces import SPACE
from argosy.data.tokenizers.proto import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, write_model
from argosy.data.tokenizers.rules import rule

KEY = "tokenizer.ggml."
ROLES = {  # llama.cpp's words, one of them as it is misspelt there
    "bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token", "seperator": "sep_token",
    "cls": "cls_token", "mask": "mask_token",
}  # fmt: skip


def read_gguf(path: Path) -> Tokenizer | None:
    """The tokenizer of a GGUF file; None where it holds none.

    Raises:
        BadInput: a pre-tokenizer rule that is not known.
        Damaged: tables that contradict each other.
        Unsupported: another kind.
    """
    meta = GGUF.open(path).meta
    kind = meta.get(f"{KEY}model")
    if kind is None or (isinstance(kind, str) and kind in ("none", "no_vocab")):
        return None
    if not isinstance(kind, str) or kind not in KINDS:
        raise Unsupported(f"the GGUF tokenizer `{str(kind)[:40]}` is not read", where=f"in {path}")
    return KINDS[kind](Tables(meta, path))


class Tables:
    """The keys of one file, checked against each other.

    Raises:
        Damaged: a table is missing, of another length or of another type.
    """

    def __init__(self, meta: dict[str, Any], path: Path):
        self.meta, self.path = meta, path
        self.tokens: list[str] = self.texts("tokens")
        kinds = self.numbers("token_type", NORMAL)
        if not np.isin(kinds, range(BYTE + 1)).all():
            raise damaged(path, f"`{KEY}token_type` holds a type that there is not")
        self.kinds = np.where(kinds == 0, NORMAL, kinds).astype(int).tolist()  # 0: nobody said
        if len(set(self.tokens)) < len(self.tokens):
            raise damaged(path, "a token stands twice")

    def texts(self, name: str) -> list[str]:
        value = self.meta.get(KEY + name)
        if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
            raise damaged(self.path, f"`{KEY}{name}` is no list of texts")
        return value

    def numbers(self, name: str, missing: float) -> np.ndarray:
        value = self.meta.get(KEY + name, np.full(len(self.tokens), missing))
        if not isinstance(value, np.ndarray) or value.shape != (len(self.tokens),) or not np.isfinite(value).all():
            raise damaged(self.path, f"`{KEY}{name}` has not one number for each token")
        return value

    def switch(self, name: str, missing: bool) -> bool:
        return bool(self.meta.get(KEY + name, missing))

    def facts(self, adds_bos: bool) -> Facts:
        """Roles by id, and the chat templates; `adds_bos` where the file does not say."""
        ids = {role: self.meta.get(f"{KEY}{word}_token_id") for word, role in ROLES.items()}
        known = {role: number for role, number in ids.items() if isinstance(number, int)}
        if wrong := next((number for number in known.values() if not 0 <= number < len(self.tokens)), None):
            raise damaged(self.path, f"the special token {wrong} is outside its {len(self.tokens)} tokens")
        key = "tokenizer.chat_template"
        templates = {DEFAULT: self.meta[key]} if isinstance(self.meta.get(key), str) else {}
        templates |= {name[len(key) + 1 :]: text for name, text in self.meta.items() if name.startswith(f"{key}.")}
        templates = {name: text for name, text in templates.items() if isinstance(text, str)}
        roles = {role: self.tokens[number] for role, number in known.items()}
        return Facts(roles, self.switch("add_bos_token", adds_bos), templates)


def byte_level(tables: Tables) -> Tokenizer:
    """`gpt2`: tokens, merges, and the name of a rule."""
    from argosy.data.tokenizers.fast import FastTokenizer

    name = tables.meta.get(f"{KEY}pre", "default")
    how = rule(str(name), f"`{KEY}pre` in {tables.path}")
    merges = [merge.split(" ", 1) for merge in tables.texts("merges")]
    if wrong := next((merge for merge in merges if len(merge) != 2), None):
        raise damaged(tables.path, f"the merge {wrong[0][:40]!r} is no pair")
    added = [
        {"id": number, "content": token, "special": kind != USER_DEFINED}
        for number, (token, kind) in enumerate(zip(tables.tokens, tables.kinds))
        if kind in (CONTROL, UNKNOWN, USER_DEFINED) and token
    ]
    vocab = {token: number for number, token in enumerate(tables.tokens)}
    return FastTokenizer(byte_bpe(vocab, merges, how, added), tables.facts(how.bos), tables.path)


def sentence_pieces(tables: Tables) -> Tokenizer:
    """`llama`: tokens with scores and kinds."""
    from argosy.data.tokenizers.pieces import PieceTokenizer

    if tables.kinds.count(UNKNOWN) != 1:
        raise damaged(tables.path, f"{tables.kinds.count(UNKNOWN)} unknown tokens, where there is one")
    facts = tables.facts(adds_bos=True)
    scores = tables.numbers("scores", 0.0).astype(float).tolist()
    data = write_model(
        list(zip(tables.tokens, scores, tables.kinds)),
        prefix=tables.switch("add_space_prefix", True),
        trims=tables.switch("remove_extra_whitespaces", False),
        bos=facts.roles.get("bos_token"),
        eos=facts.roles.get("eos_token"),
    )
    return PieceTokenizer(data, facts, tables.path)


def word_pieces(tables: Tables) -> Tokenizer:
    """`bert`: a mark for the beginning of a word, where BERT's own file marks what goes on with one."""
    from argosy.data.tokenizers.fast import FastTokenizer

    tokens = [
        token if token.startswith("[") and token.endswith("]")
        else token.removeprefix(SPACE) if token.startswith(SPACE) else f"##{token}"
        for token in tables.tokens
    ]  # fmt: skip
    return FastTokenizer(from_word_pieces(tokens, {}), tables.facts(adds_bos=False), tables.path)


KINDS = {"gpt2": byte_level, "llama": sentence_pieces, "bert": word_pieces}
