"""Older vocabularies as the content of a tokenizer.json: GPT-2's pair of files, WordPiece, tiktoken's ranks.

Notable: tiktoken merges any two neighbours whose union has the lowest rank, so every way to split a token becomes a merge
here, in the order of the ranks. Its files do not say how text is cut: that is known by name, for few.
"""

import base64
import binascii
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from argosy.core.errors import BadInput
from argosy.data.tokenizers.byte import byte_names
from argosy.data.tokenizers.facts import damaged, parse_object
from argosy.data.tokenizers.rules import BYTE_LEVEL, RULES, Rule, pre_tokenizer

RANKS = {"cl100k": Rule(RULES["dbrx"].cuts, whole=True), "o200k": Rule(RULES["gpt-4o"].cuts, whole=True),
         "qwen": Rule(RULES["qwen2"].cuts, nfc=True, whole=True)}  # fmt: skip
"""Rules of tiktoken files, by how the file's name begins."""
GPT2_ROLES = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
BERT_ROLES = {
    "unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]", "mask_token": "[MASK]",
}  # fmt: skip
WHOLE_WORD_CHARACTERS = 100  # longer words are unknown to BERT (google-research/bert, tokenization.py)


def byte_bpe(
    vocab: Mapping[str, int], merges: list[str] | list[list[str]], rule: Rule, added: list[dict[str, Any]]
) -> str:
    """A byte-level BPE."""
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": rule.whole,
        "vocab": vocab, "merges": merges,
    }  # fmt: skip
    return tokenizer_json(model, {"type": "NFC"} if rule.nfc else None, pre_tokenizer(rule), BYTE_LEVEL, added)


def tokenizer_json(model: Any, normalizer: Any, cutting: Any, decoder: Any, added: list[dict[str, Any]]) -> str:
    """The content of a file (format of huggingface/tokenizers)."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return json.dumps(
        {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": [flags | token for token in added],
            "normalizer": normalizer, "pre_tokenizer": cutting, "post_processor": None, "decoder": decoder,
            "model": model,
        },
        ensure_ascii=False,
    )  # fmt: skip


def from_vocab_and_merges(vocab: str, merges: str, path: Path) -> str:
    """GPT-2's two files.

    Raises:
        Damaged: a line of merges.txt is no pair, or vocab.json no table of ids.
    """
    table = parse_object(vocab, path)
    if not all(isinstance(number, int) for number in table.values()):
        raise damaged(path, "a token's id is no number")
    lines = [line for line in merges.split("\n") if line and not line.startswith("#version")]
    pairs = [line.rstrip("\r").split(" ") for line in lines]
    if wrong := next((pair for pair in pairs if len(pair) != 2), None):
        raise damaged(path.with_name("merges.txt"), f"{' '.join(wrong)[:40]!r} is no pair")
    return byte_bpe(table, pairs, RULES["gpt-2"], [])


def from_word_pieces(tokens: list[str], config: Mapping[str, Any]) -> str:
    """BERT's WordPiece; `##` marks what goes on with a word."""
    lowers = config.get("do_lower_case", True) is not False
    accents = config.get("strip_accents")
    normalizer = {
        "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": lowers,
        "strip_accents": accents if isinstance(accents, bool) else None,
    }  # fmt: skip
    vocab = {token: number for number, token in enumerate(tokens)}
    model = {
        "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "vocab": vocab,
        "max_input_chars_per_word": WHOLE_WORD_CHARACTERS,
    }  # fmt: skip
    decoder = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    return tokenizer_json(model, normalizer, {"type": "BertPreTokenizer"}, decoder, [])


def from_ranks(text: str, path: Path) -> str:
    """tiktoken's file: a line a token, its bytes in base64 and its rank.

    Raises:
        BadInput: the name says nothing of how text is cut.
        Damaged: a line that is none of these.
    """
    rule = next((rule for name, rule in RANKS.items() if path.name.startswith(name)), None)
    if rule is None:
        raise BadInput(
            f"how text is cut for `{path.name}` is not known",
            where="a .tiktoken file holds ranks only",
            hint=f"known are files whose names begin with {', '.join(RANKS)}",
        )
    ranks = dict(ranked(line, path) for line in text.splitlines() if line)
    names = byte_names()
    merges = [
        (rank, ranks[token[:cut]], token[:cut], token[cut:])
        for token, rank in ranks.items()
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]

    def spelt(token: bytes) -> str:
        return "".join(names[byte] for byte in token)

    pairs = [[spelt(left), spelt(right)] for _, _, left, right in sorted(merges)]
    return byte_bpe({spelt(token): rank for token, rank in ranks.items()}, pairs, rule, [])


def ranked(line: str, path: Path) -> tuple[bytes, int]:
    token, _, rank = line.partition(" ")
    try:
        return base64.b64decode(token, validate=True), int(rank)
    except (binascii.Error, ValueError):
        raise damaged(path, f"the line {line[:40]!r} is no token with its rank") from None
