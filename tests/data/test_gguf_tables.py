"""A tokenizer's tables for GGUF files: read again they encode and decode equally, and what they cannot hold is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import shared

from argosy.core.errors import Unsupported
from argosy.core.formats.files import write_file
from argosy.core.formats.gguf_writer import gguf_file
from argosy.data.tokenizers import Tokenizer
from argosy.data.tokenizers.byte import ByteTokenizer
from argosy.data.tokenizers.gguf_writer import gguf_tables, rule_name
from argosy.data.tokenizers.load import load_tokenizer
from argosy.data.tokenizers.rules import RULES, pre_tokenizer

SPECIAL = ["<|im_start|>user\nHi<|im_end|>", "<s>[INST] Hi [/INST]</s>", "a<|endoftext|> b"]


def again(tokenizer: Tokenizer, folder: Path, more: int = 0) -> Tokenizer:
    """Through a file."""
    write_file(folder / "x.gguf", gguf_file("x.gguf", gguf_tables(tokenizer, tokenizer.vocab + more), []))
    return load_tokenizer(folder / "x.gguf")


def check_alike(a: Tokenizer, b: Tokenizer) -> None:
    prose = shared("text/tinyshakespeare.txt").read_text()[:20_000]
    for text in [*prose.split("\n\n"), " x  y\t\n\nz ", "日本 é 😀", *SPECIAL]:
        for special in (False, True):
            assert a.encode(text, special) == b.encode(text, special), text
        ids = a.encode(text)
        assert a.decode(ids) == b.decode(ids)
    assert (a.bos, a.eos, a.pad, a.adds_bos, a.vocab) == (b.bos, b.eos, b.pad, b.adds_bos, b.vocab)
    assert a.chat_templates == b.chat_templates
    assert a.hidden == b.hidden


@pytest.mark.parametrize(
    ("name", "pre"),
    [
        ("tokenizers/smollm2", "smollm"),
        pytest.param("tokenizers/gpt2", "gpt-2", marks=pytest.mark.slow),
        # Words that are tokens are taken whole, as llama.cpp does by this name and not by `dbrx`.
        pytest.param("tokenizers/cl100k_base.tiktoken", "llama-bpe", marks=pytest.mark.slow),
        pytest.param("tokenizers/qwen.tiktoken", "qwen2", marks=pytest.mark.slow),
    ],
)
def test_byte_level_vocabularies(name, pre, tmp_path):
    tokenizer = load_tokenizer(shared(name))
    assert gguf_tables(tokenizer, tokenizer.vocab)["tokenizer.ggml.pre"] == pre
    check_alike(tokenizer, again(tokenizer, tmp_path, more=3))


@pytest.mark.parametrize("name", ["tokenizers/mistral_v1.model", "tokenizers/mistral_v3.model", "models/stories260k"])
def test_sentencepiece_vocabularies(name, tmp_path):
    tokenizer = load_tokenizer(shared(name))
    assert gguf_tables(tokenizer, tokenizer.vocab)["tokenizer.ggml.model"] == "llama"
    check_alike(tokenizer, again(tokenizer, tmp_path, more=3))


def sentencepiece_as_json(folder: Path, merges: list[str]) -> Path:
    """Llama 2's kind of tokenizer.json."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ["▁", "a", "b", "▁a", "ab", "▁ab"]:
        vocab[piece] = len(vocab)
    content: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [
            {"id": vocab[text], "content": text, "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for text in ("<unk>", "<s>", "</s>")
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE", "vocab": vocab, "merges": merges, "unk_token": "<unk>", "byte_fallback": True,
            "fuse_unk": True,
        },
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}))
    return folder


def test_sentencepiece_in_a_tokenizer_json(tmp_path):
    merges = ["▁ a", "a b", "▁ ab", "▁a b"]
    tokenizer = load_tokenizer(sentencepiece_as_json(tmp_path, merges))
    read = again(tokenizer, tmp_path)
    for text in ("ab a b aab", "b", " ab  é"):
        assert tokenizer.encode(text) == read.encode(text), text
        assert tokenizer.decode(tokenizer.encode(text)) == read.decode(read.encode(text))
    assert (read.bos, read.eos, read.adds_bos) == (1, 2, True)
    # SentencePiece merges every pair that is a piece.
    with pytest.raises(Unsupported, match="is encoded"):
        again(load_tokenizer(sentencepiece_as_json(tmp_path, merges[:3])), tmp_path)


def test_chat_templates_by_name(tmp_path):
    tokenizer = load_tokenizer(shared("tokenizers/smollm2"))
    assert tokenizer.chat_template
    tokenizer.config = type(tokenizer.config)(**vars(tokenizer.config) | {"templates": {"default": "{{a}}", "tools": "{{b}}"}})
    assert again(tokenizer, tmp_path).chat_templates == {"default": "{{a}}", "tools": "{{b}}"}


@pytest.mark.parametrize("name", "gpt-2 smollm llama-bpe qwen2 tekken gpt-4o deepseek-v3 kimi-k2 bloom viking".split())  # noqa: SIM905
def test_rules_are_found_by_how_they_cut(name):
    rule = RULES[name]
    content = {
        "normalizer": {"type": "NFC"} if rule.nfc else None,
        "pre_tokenizer": pre_tokenizer(rule),
        "model": {"ignore_merges": rule.whole},
    }
    found_rule = RULES[rule_name(content)]
    assert (found_rule.cuts, found_rule.nfc, found_rule.whole) == (rule.cuts, rule.nfc, rule.whole)


def test_what_tables_cannot_hold_is_refused(tmp_path):
    with pytest.raises(Unsupported, match="ByteTokenizer"):
        gguf_tables(ByteTokenizer(), 300)
    content = json.loads((shared("tokenizers/smollm2") / "tokenizer.json").read_text())
    apart = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, content["pre_tokenizer"]]}
    for change, problem in (
        ({"normalizer": {"type": "Lowercase"}}, "is encoded"),
        ({"pre_tokenizer": apart}, "cuts text"),
        ({"pre_tokenizer": None}, "neither of bytes"),
    ):
        (tmp_path / "tokenizer.json").write_text(json.dumps(content | change))
        tokenizer = load_tokenizer(tmp_path)
        with pytest.raises(Unsupported, match=problem):
            gguf_tables(tokenizer, tokenizer.vocab)
    unigram = load_tokenizer(shared("tokenizers/c4_32k.model"))
    with pytest.raises(Unsupported, match="has no place in a GGUF file"):
        gguf_tables(unigram, unigram.vocab)
