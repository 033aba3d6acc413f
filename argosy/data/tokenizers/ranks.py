"""Converts tiktoken's vocabularies to a tokenizer.json. A file has one line per token: its bytes in base64, and its rank
(openai/tiktoken, load.py).

tiktoken merges the two neighbors whose union has the lowest rank. So every way to split a token into two becomes a merge here, in the
order of the ranks. A file tells neither how text is split into words nor what the special tokens are. Both follow from the name of the
file, of which only a few are known.
"""

import base64
import binascii
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from argosy.core.errors import BadInput
from argosy.data.tokenizers.byte import byte_names
from argosy.data.tokenizers.config import TokenizerConfig, damaged_file_error
from argosy.data.tokenizers.convert import END, byte_bpe
from argosy.data.tokenizers.rules import RULES, SplitRule

# The largest published vocabulary has 200,000.
MOST_RANK = 1 << 24
# The number of special ids after the ranks of Kimi K2. Their names come from its config, or else from their number.
RESERVED = 256
QWEN = [END, "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205))]
CL100K = {END: 100_257, "<|fim_prefix|>": 100_258, "<|fim_middle|>": 100_259, "<|fim_suffix|>": 100_260,
          "<|endofprompt|>": 100_276}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A kind of tiktoken vocabulary.

    rule: how text is split into words.
    special: (lowest free id, config) -> the ids of special tokens by name.
    roles: the default names of special tokens by role.
    """

    rule: SplitRule
    special: Callable[[int, TokenizerConfig], Mapping[str, int]]
    roles: Mapping[str, str] = field(default_factory=lambda: {"eos_token": END})


def reserved_tokens(first: int, config: TokenizerConfig) -> dict[str, int]:
    """The special tokens of Kimi, from id `first` on. Names come from tokenizer_config.json, or else from the number
    (moonshotai/Kimi-K2-Instruct, tokenization_kimi.py)."""
    names = {number: str(token["content"]) for number, token in config.added.items()}
    return {names.get(number, f"<|reserved_token_{number}|>"): number for number in range(first, first + RESERVED)}


def known_split_rule(rule: str) -> SplitRule:
    """The split rule of this name, but with words that are tokens taken whole, without merges, as in tiktoken."""
    return replace(RULES[rule], whole=True)


KINDS = {
    "r50k": Kind(known_split_rule("gpt-2"), lambda first, config: {END: 50_256}),
    "p50k": Kind(known_split_rule("gpt-2"), lambda first, config: {END: 50_256}),
    "cl100k": Kind(known_split_rule("dbrx"), lambda first, config: CL100K),
    "o200k": Kind(known_split_rule("gpt-4o"), lambda first, config: {END: 199_999, "<|endofprompt|>": 200_018}),
    "qwen": Kind(known_split_rule("qwen2"), lambda first, config: {name: first + n for n, name in enumerate(QWEN)}),
    "tiktoken.model": Kind(known_split_rule("kimi-k2"), reserved_tokens, {"bos_token": "[BOS]", "eos_token": "[EOS]"}),
}
"""By how the file's name begins."""


def from_ranks(text: str, config: TokenizerConfig, path: Path) -> tuple[str, TokenizerConfig]:
    """Converts ranks. Returns the text of a tokenizer.json, and the config with the default roles of this kind.

    Raises:
        BadInput: the name of the file does not tell how text is split.
        Damaged: a line is no token with its rank, or a token or rank occurs twice.
    """
    kind = next((kind for name, kind in KINDS.items() if path.name.startswith(name)), None)
    if kind is None:
        raise BadInput(
            f"how text is cut for `{path.name}` is not known",
            where="a file of tiktoken holds ranks only",
            hint=f"known are files whose names begin with {', '.join(KINDS)}; else take the tokenizer.json",
        )
    lines = [parse_rank(line, path) for line in text.splitlines() if line]
    ranks = dict(lines)
    if len(ranks) < len(lines) or len(set(ranks.values())) < len(lines):
        raise damaged_file_error(path, "a token or a rank stands twice")
    special = dict(kind.special(max(ranks.values(), default=-1) + 1, config))
    if duplicates := set(special.values()) & set(ranks.values()):
        raise damaged_file_error(path, f"{len(duplicates)} special tokens have the rank of another")
    names = byte_names()
    vocab = {"".join(names[byte] for byte in token): rank for token, rank in ranks.items()}
    added = [{"id": number, "content": name, "special": True} for name, number in special.items()]
    roles = {role: name for role, name in kind.roles.items() if name in special}
    return byte_bpe(vocab | special, list(merges(ranks, names)), kind.rule, added), config.filled(roles)


def merges(ranks: Mapping[bytes, int], names: Mapping[int, str]) -> Iterator[list[str]]:
    """Yields the merges of a byte-pair vocabulary: every split of a token into two others, sorted by the rank of the token.

    Args:
        ranks: the rank of each token.
        names: byte -> the character that stands for it in tokenizer.json.
    """
    pairs = [
        (rank, ranks[token[:cut]], token[:cut], token[cut:])
        for token, rank in ranks.items()
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    for _, _, left, right in sorted(pairs):
        yield ["".join(names[byte] for byte in part) for part in (left, right)]


def holds_ranks(data: bytes) -> bool:
    """Whether the content of a tokenizer.model is tiktoken's ranks, as in Meta's Llama 3, and not a SentencePiece model."""
    return re.match(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n", data[:4096]) is not None


def parse_rank(line: str, path: Path) -> tuple[bytes, int]:
    token, _, rank = line.partition(" ")
    try:
        data, number = base64.b64decode(token, validate=True), int(rank)
    except (binascii.Error, ValueError):
        raise damaged_file_error(path, f"the line {line[:40]!r} is no token with its rank") from None
    if not data or not 0 <= number < MOST_RANK:
        raise damaged_file_error(path, f"the line {line[:40]!r} is no token with its rank")
    return data, number
