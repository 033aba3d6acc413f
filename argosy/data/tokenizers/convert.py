"""Converts older vocabularies to a tokenizer.json: vocab.json with merges.txt, WordPiece, and CLIP's list of merges.

None of these files says how text is split into words. For vocab.json, the class in tokenizer_config.json decides; if there is none, the
rule is GPT-2's. An unknown class is refused, because a wrong rule would give wrong ids without an error. `ranks` converts tiktoken's
ranks.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from argosy.core.errors import BadInput, nearest
from argosy.data.tokenizers.byte import byte_names
from argosy.data.tokenizers.config import TokenizerConfig, damaged_file_error, parse_object, read_bytes
from argosy.data.tokenizers.rules import BYTE_LEVEL, RULES, SplitRule, pre_tokenizer

END = "<|endoftext|>"
GPT2_ROLES = {"bos_token": END, "eos_token": END}
BERT_ROLES = {
    "unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]", "mask_token": "[MASK]",
}  # fmt: skip
ROBERTA_ROLES = {
    "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "sep_token": "</s>", "pad_token": "<pad>", "cls_token": "<s>",
    "mask_token": "<mask>",
}  # fmt: skip
CLIP_ROLES = {"bos_token": "<|startoftext|>", "eos_token": END, "unk_token": END, "pad_token": END}
PAIRED: dict[str, tuple[SplitRule, dict[str, str]]] = {
    **dict.fromkeys(["GPT2", "CodeGen"], (RULES["gpt-2"], GPT2_ROLES)),
    **dict.fromkeys(["Roberta", "Bart", "Longformer", "LED"], (RULES["gpt-2"], ROBERTA_ROLES)),
    "Qwen2": (RULES["qwen2"], {"eos_token": END, "pad_token": END}),
}
"""By class without its ending: how text is cut where the vocabulary is vocab.json, and the roles that go without saying."""
CLIP_CUT = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
# The list is longer than the vocabulary (openai/CLIP, simple_tokenizer.py).
CLIP_MERGES = 49_152 - 256 - 2
CLIP_BYTES = 8 << 20  # unpacked; the published list has 3 MB
# Longer words become the unknown token in BERT (google-research/bert, tokenization.py).
WHOLE_WORD_CHARACTERS = 100


def byte_bpe(
    vocab: Mapping[str, int], merges: list[str] | list[list[str]], rule: SplitRule, added: list[dict[str, Any]]
) -> str:
    """The tokenizer.json of a byte-level BPE.

    Args:
        vocab: the ids by token.
        merges: the merges in order.
        rule: how text is split into words.
        added: the added tokens.
    """
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": rule.whole,
        "vocab": vocab, "merges": merges,
    }  # fmt: skip
    return _tokenizer_json(model, {"type": "NFC"} if rule.nfc else None, pre_tokenizer(rule), BYTE_LEVEL, added)


def _tokenizer_json(
    model: Any, normalizer: Any, cutting: Any, decoder: Any, added: list[dict[str, Any]], frame: dict[str, Any] | None = None
) -> str:
    """The text of a tokenizer.json (format of huggingface/tokenizers). `frame` is its post-processor."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return json.dumps(
        {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": [flags | token for token in added],
            "normalizer": normalizer, "pre_tokenizer": cutting, "post_processor": frame, "decoder": decoder,
            "model": model,
        },
        ensure_ascii=False,
    )  # fmt: skip


def from_vocab_and_merges(vocab: str, merges: str, config: TokenizerConfig, path: Path) -> tuple[str, TokenizerConfig]:
    """Converts vocab.json and merges.txt. Returns a tokenizer.json, and the config with the default roles of its class.

    Raises:
        BadInput: the class that the config names is not known.
        Damaged: a line of merges.txt is no pair, or vocab.json is no table of ids.
    """
    kind = str(config.raw.get("tokenizer_class") or "GPT2Tokenizer").removesuffix("Fast").removesuffix("Tokenizer")
    if kind != "CLIP" and kind not in PAIRED:
        where = f"`tokenizer_class` beside {path}"
        raise BadInput(f"how text is cut for `{kind[:40]}` is not known", where=where, hint=nearest(kind, PAIRED))
    table = parse_object(vocab, path)
    if not all(type(number) is int and 0 <= number < 2**31 for number in table.values()):
        raise damaged_file_error(path, "a token's id is no number")
    lines = [line for line in merges.split("\n") if line and not line.startswith("#version")]
    pairs = [line.rstrip("\r").split(" ") for line in lines]
    if wrong := next((pair for pair in pairs if len(pair) != 2), None):
        raise damaged_file_error(path.with_name("merges.txt"), f"{' '.join(wrong)[:40]!r} is no pair")
    if kind == "CLIP":
        return clip(table, pairs), config.filled(CLIP_ROLES)
    rule, roles = PAIRED[kind]
    return byte_bpe(table, pairs, rule, []), config.filled(roles)


def from_clip(path: Path) -> str:
    """Converts CLIP's compressed list of merges to a tokenizer.json. The vocabulary follows from the merges: the bytes, the bytes that
    end a word, the merged pairs, and two special tokens.

    Raises:
        Damaged: the file cannot be decompressed, or does not hold pairs.
    """
    unpacked = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        text = unpacked.decompress(read_bytes(path), CLIP_BYTES).decode("utf-8")
    except (zlib.error, UnicodeDecodeError):
        raise damaged_file_error(path, "it is no packed text") from None
    pairs = [line.split() for line in text.split("\n")[1 : CLIP_MERGES + 1]]
    if len(pairs) < CLIP_MERGES or any(len(pair) != 2 for pair in pairs):
        raise damaged_file_error(path, f"it does not begin with {CLIP_MERGES} pairs")
    alphabet = byte_names().values()
    tokens = [*alphabet, *(f"{name}</w>" for name in alphabet), *map("".join, pairs), *list(CLIP_ROLES.values())[:2]]
    return clip({token: number for number, token in enumerate(tokens)}, pairs)


def clip(vocab: Mapping[str, int], merges: list[list[str]]) -> str:
    """The tokenizer.json of CLIP's byte-level BPE: text is lower-cased, runs of blanks become one, and words have a mark at their end
    instead of a space before them."""
    normalizers = [
        {"type": "NFC"}, {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "}, {"type": "Lowercase"},
    ]  # fmt: skip
    words = {"type": "Split", "pattern": {"Regex": CLIP_CUT}, "behavior": "Removed", "invert": True}
    model = {
        "type": "BPE", "dropout": None, "unk_token": END, "continuing_subword_prefix": "",
        "end_of_word_suffix": "</w>", "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": vocab, "merges": merges,
    }  # fmt: skip
    space = byte_names()[ord(" ")]
    decoders = [
        {"type": "Replace", "pattern": {"String": "</w>"}, "content": space}, BYTE_LEVEL, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 0, "stop": 1},
    ]  # fmt: skip
    added = [
        {"id": vocab[token], "content": token, "special": True}
        for token in dict.fromkeys(CLIP_ROLES.values())
        if token in vocab
    ]
    return _tokenizer_json(
        model,
        {"type": "Sequence", "normalizers": normalizers},
        {"type": "Sequence", "pretokenizers": [words, BYTE_LEVEL]},
        {"type": "Sequence", "decoders": decoders},
        added,
    )


def from_word_pieces(tokens: list[str], config: Mapping[str, Any]) -> str:
    """The tokenizer.json of BERT's WordPiece. `##` marks tokens that continue a word.

    Args:
        tokens: the tokens in the order of their ids.
        config: the content of tokenizer_config.json.
    """
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
    return _tokenizer_json(model, normalizer, {"type": "BertPreTokenizer"}, decoder, [], bert_frame(vocab))


def bert_frame(vocab: Mapping[str, int]) -> dict[str, Any] | None:
    """The post-processor of a tokenizer.json that adds BERT's special tokens around a text or two texts; None if the vocabulary has no
    [CLS] and [SEP]. A vocab.txt does not hold it."""
    if not {"[CLS]", "[SEP]"} <= vocab.keys():
        return None

    def token(name: str, kind: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": name, "type_id": kind}}

    single = [token("[CLS]", 0), {"Sequence": {"id": "A", "type_id": 0}}, token("[SEP]", 0)]
    special = {name: {"id": name, "ids": [vocab[name]], "tokens": [name]} for name in ("[CLS]", "[SEP]")}
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}, token("[SEP]", 1)]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}
