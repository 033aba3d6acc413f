"""Converts a tokenizer to the tables of a GGUF file, as llama.cpp's converter writes them. It is the inverse of `gguf`.

    byte-level BPE (tokenizer.json, vocab.json with merges.txt, tiktoken)    `gpt2`, with the name of the rule that splits text
    SentencePiece's BPE, and a tokenizer.json converted from it              `llama`, with scores

Tables hold less than the files that they come from: only rules that llama.cpp knows have a name, and normalizers are not stored. So the
tables are read again, and an error is raised if they would encode some text differently.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Library

from argosy.core.errors import Unsupported
from argosy.data.tokenizers import Tokenizer
from argosy.data.tokenizers.config import DEFAULT
from argosy.data.tokenizers.fast import FastTokenizer, parse
from argosy.data.tokenizers.gguf import KEY, KINDS, ROLES, VocabularyTables
from argosy.data.tokenizers.pieces import SPACE, PieceTokenizer
from argosy.data.tokenizers.proto import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from argosy.data.tokenizers.rules import RULES, pre_tokenizer

# The scores of tokens without a score and of filler tokens, as in llama.cpp's converter.
NO_SCORE, FILLER_SCORE = -1000.0, -10_000.0
SAMPLES = (
    "Hello  world,\n\n  it's 1234567 IT'LL cost $3.50 (about 2½)...\t\tx=y_z; don't\r\n",
    " leading and trailing   ", "日本語とかな 한국어 العربية हिन्दी ไทย 😀👍🏽", "ﬁne e\u0301t\u00e9 Ⅷ ＡＢＣ a\u00a0b",
    "def f(x):\n    return x**2  # 100,000\n\n\n", "ab1cd22ef333 \u2028 \u200d <s>[INST]</s>", "",
)  # fmt: skip
"""Texts that rules, normalizers and merges tell apart."""


def gguf_tables(tokenizer: Tokenizer, vocab: int) -> dict[str, Any]:
    """The GGUF keys and values of a tokenizer, for a model with a vocabulary of `vocab` rows.

    Raises:
        Unsupported: tokenizers of this kind cannot be converted, or the tables would encode some text differently.
    """
    if isinstance(tokenizer, PieceTokenizer):
        tables = _of_pieces(tokenizer)
    elif isinstance(tokenizer, FastTokenizer):
        tables = _of_content(tokenizer)
    else:
        raise _unsupported(f"a tokenizer of the kind {type(tokenizer).__name__}")
    table = _with_fillers(tables, vocab) | _ends(tokenizer)
    _check_alike(tokenizer, table)
    return table


def _unsupported(noun: str) -> Unsupported:
    return Unsupported(f"{noun} has no place in a GGUF file")


def _with_fillers(table: dict[str, Any], vocab: int) -> dict[str, Any]:
    """Fills the tables up with unused tokens to the number of rows of the embedding."""
    missing = range(len(table[f"{KEY}tokens"]), vocab)
    out = dict(table)
    out[f"{KEY}tokens"] = [*table[f"{KEY}tokens"], *(f"[PAD{number}]" for number in missing)]
    for name, filler in (("token_type", UNUSED), ("scores", FILLER_SCORE)):
        if (key := KEY + name) in table:
            out[key] = np.concatenate([table[key], np.full(len(missing), filler, table[key].dtype)])
    return out


def _ends(tokenizer: Tokenizer) -> dict[str, Any]:
    """The keys of special tokens and chat templates."""
    ids = {role: _id_of(tokenizer, text) for role, text in tokenizer.config.roles.items()}
    ids |= {"bos_token": tokenizer.bos, "eos_token": tokenizer.eos, "pad_token": tokenizer.pad}
    out: dict[str, Any] = {f"{KEY}{word}_token_id": ids[role] for word, role in ROLES.items() if ids.get(role) is not None}
    out[f"{KEY}add_bos_token"] = tokenizer.adds_bos
    named_templates = {name: text for name, text in tokenizer.config.templates.items() if name != DEFAULT}
    if DEFAULT in tokenizer.config.templates:
        out["tokenizer.chat_template"] = tokenizer.config.templates[DEFAULT]
    if named_templates:
        out["tokenizer.chat_templates"] = list(named_templates)
        out |= {f"tokenizer.chat_template.{name}": text for name, text in named_templates.items()}
    return out


def _id_of(tokenizer: Tokenizer, text: str) -> int | None:
    """The id of a special token; None if its text is not a single token."""
    ids = tokenizer.encode(text, special=True)
    return ids[0] if len(ids) == 1 else None


def _check_alike(tokenizer: Tokenizer, table: Mapping[str, Any]) -> None:
    """Reads the tables again, and compares the encodings of SAMPLES.

    Raises:
        Unsupported: a sample is encoded differently.
    """
    # Reading removes the fillers, so it gets a copy.
    copy = {**table, f"{KEY}tokens": [*table[f"{KEY}tokens"]]}
    again = KINDS[table[f"{KEY}model"]](VocabularyTables(copy, Path("tokenizer")))
    special = "".join(dict.fromkeys(tokenizer.config.roles.values()))
    for text, marked in [*((text, False) for text in SAMPLES), (f"a{special} b", True)]:
        if again.encode(text, marked) != tokenizer.encode(text, marked):
            raise _unsupported(f"how {text[:30]!r} is encoded")


# ---- byte-level BPE, and SentencePiece as a tokenizer.json


def _of_content(tokenizer: FastTokenizer) -> dict[str, Any]:
    content = tokenizer.content
    model = content["model"]
    if model.get("type", "BPE") != "BPE":
        raise _unsupported(f"a {model.get('type')} tokenizer")
    added = {token["id"]: token for token in content.get("added_tokens") or []}
    vocab = {number: text for text, number in model["vocab"].items()} | {number: t["content"] for number, t in added.items()}
    size = max(vocab) + 1
    tokens = [vocab.get(number, f"[PAD{number}]") for number in range(size)]
    kinds = [NORMAL if number in vocab else UNUSED for number in range(size)]
    for number, token in added.items():
        kinds[number] = CONTROL if token.get("special") else USER_DEFINED
    merges = [tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in model.get("merges") or []]
    if "ByteLevel" in json.dumps(content.get("pre_tokenizer")):
        return _table("gpt2", tokens, kinds) | {
            f"{KEY}pre": rule_name(content),
            f"{KEY}merges": [" ".join(pair) for pair in merges],
        }
    if not model.get("byte_fallback"):
        raise _unsupported("a BPE tokenizer that is neither of bytes nor SentencePiece's")
    return _table("llama", tokens, _piece_kinds(tokens, kinds, model.get("unk_token"))) | {
        f"{KEY}scores": _scores(tokens, kinds, merges),
        f"{KEY}add_space_prefix": tokenizer.puts_space,
    }


def _table(kind: str, tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    return {f"{KEY}model": kind, f"{KEY}tokens": tokens, f"{KEY}token_type": np.array(kinds, np.int32)}


def _piece_kinds(tokens: list[str], kinds: list[int], unknown: str | None) -> list[int]:
    names = {f"<0x{byte:02X}>" for byte in range(256)}
    return [
        UNKNOWN if token == unknown else BYTE if token in names and kind == NORMAL else kind
        for token, kind in zip(tokens, kinds, strict=True)
    ]


def _scores(tokens: list[str], kinds: list[int], merges: list[tuple[str, ...]]) -> np.ndarray:
    """Converts the order of merges to scores: SentencePiece merges the pair with the highest score first, and `tokenizers` that of the
    first merge."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    scores = [
        NO_SCORE if kind in (CONTROL, USER_DEFINED, UNUSED) else -float(ranks.get(token, len(merges)))
        for token, kind in zip(tokens, kinds, strict=True)
    ]
    return np.array(scores, np.float32)


def rule_name(content: Mapping[str, Any]) -> str:
    """Finds the name of the rule by which a tokenizer.json splits text, by comparing how the rules split SAMPLES.

    Raises:
        Unsupported: no rule splits them in the same way.
    """
    normalizer = content.get("normalizer")
    expected = list(_cuts(content.get("pre_tokenizer")))
    composes, whole = "NFC" in json.dumps(normalizer), bool(content["model"].get("ignore_merges"))
    alike = [name for name, rule in RULES.items() if rule.nfc == composes and list(_cuts(pre_tokenizer(rule))) == expected]
    exact = [name for name in alike if RULES[name].whole == whole]
    if not alike:
        raise _unsupported("the way this tokenizer cuts text into words")
    return (exact or alike)[0]


def _cuts(cutting: Any) -> Iterator[list[str]]:
    """Yields the words into which a pre-tokenizer splits each of SAMPLES."""
    model = {"type": "BPE", "vocab": {}, "merges": []}
    library: Library = parse(json.dumps({"model": model, "pre_tokenizer": cutting}), Path("tokenizer.json"))
    for text in SAMPLES:
        yield [word for word, _ in library.pre_tokenizer.pre_tokenize_str(text)]


# ---- SentencePiece


def _of_pieces(tokenizer: PieceTokenizer) -> dict[str, Any]:
    model = tokenizer.model
    if not model.bpe:
        raise _unsupported("a unigram tokenizer")
    tokens, kinds, scores = map(list, zip(*tokenizer.scored_pieces(), strict=True))
    for number, (text, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if number >= len(model.pieces):
            tokens[number], scores[number] = text or f"[PAD{number}]", NO_SCORE
        if kind == USER_DEFINED:
            tokens[number] = text.replace(SPACE, " ")
    return _table("llama", tokens, kinds) | {
        f"{KEY}scores": np.array(scores, np.float32),
        f"{KEY}add_space_prefix": model.prefix,
        f"{KEY}remove_extra_whitespaces": model.trims,
    }
