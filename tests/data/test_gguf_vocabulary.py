"""GGUF vocabularies as llama.cpp's converter writes them, against the SentencePiece models that they come from."""

from pathlib import Path

import pytest
import sentencepiece
from gguf_files import converted_vocabulary, write_vocabulary
from helpers import shared

from argosy.core.errors import Damaged
from argosy.data.tokenizers import Tokenizer
from argosy.data.tokenizers.config import TokenizerConfig
from argosy.data.tokenizers.load import load_tokenizer
from argosy.data.tokenizers.pieces import PieceTokenizer
from argosy.data.tokenizers.proto import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, write_model

TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", "  ", "\u2581", "a", "b"]
KINDS = [CONTROL] * 4 + [USER_DEFINED] + [NORMAL] * 3
TEXTS = ["a  b", "Hello  world,\n\n  it is 日本 😀\t\tx", " leading", "trailing  ", "a<s>b</s>", "1 2 3    4", ""]


def minimal(folder: Path, tokens: list[str] = TOKENS, kinds: list[int] = KINDS, **keys: int) -> Tokenizer:
    keys = {"unknown_token_id": 3, "add_space_prefix": False} | keys
    keys = {name: value for name, value in keys.items() if value is not None}
    return load_tokenizer(write_vocabulary(folder / "x.gguf", tokens, kinds, [0.0] * len(tokens), **keys))


def convert_vocabulary(folder: Path, added: dict[int, dict], more: int, **keys: int) -> tuple[Tokenizer, PieceTokenizer]:
    """Mistral's vocabulary through the converter, and as the model with the same added tokens."""
    path = shared("tokenizers/mistral_v3.model")
    model = sentencepiece.SentencePieceProcessor(str(path))
    tables = converted_vocabulary(model, added, model.vocab_size() + more)
    tokenizer = load_tokenizer(write_vocabulary(folder / "x.gguf", *tables, unknown_token_id=0, bos_token_id=1, **keys))
    return tokenizer, PieceTokenizer(path.read_bytes(), TokenizerConfig(added=added), path)


def test_unknown_is_found_where_it_is_typed_as_control_and_spaces_of_user_defined_tokens_match(tmp_path):
    tokenizer = minimal(tmp_path)
    assert tokenizer.encode("a  b") == [6, 4, 7]
    assert tokenizer.decode([6, 4, 7, 5, 6]) == "a  b a"
    assert tokenizer.encode("a b") == [6, 5, 7]
    assert tokenizer.encode("c") == [3]


def test_unknown_is_found_by_its_name_where_no_key_names_it(tmp_path):
    assert minimal(tmp_path, unknown_token_id=None).encode("a  bc") == [6, 4, 7, 3]


def test_a_vocabulary_without_an_unknown_token_is_damaged(tmp_path):
    with pytest.raises(Damaged, match="0 unknown tokens"):
        minimal(tmp_path, tokens=["<x>" if token == "<unk>" else token for token in TOKENS], unknown_token_id=None)


def test_two_spellings_of_one_piece_are_reported(tmp_path):
    with pytest.raises(Damaged, match="same text"):
        minimal(tmp_path, [*TOKENS, "\u2581\u2581"], [*KINDS, NORMAL])


def test_fillers_at_the_end_are_no_tokens(tmp_path):
    tokenizer = minimal(
        tmp_path, [*TOKENS, "[PAD8]", "c", "[PAD10]", "[PAD11]"], [*KINDS, UNUSED, NORMAL, UNUSED, UNUSED]
    )
    assert tokenizer.vocab == 10
    assert tokenizer.encode("a  bc") == [6, 4, 7, 9]
    assert tokenizer.decode([6, 11, 9]) == "ac"
    assert minimal(tmp_path, [*TOKENS, "[PAD8]"], [*KINDS, UNUSED], padding_token_id=8).pad == 8


def test_a_real_vocabulary_converts_without_a_changed_token(tmp_path):
    """As every Llama, Mistral and Gemma file is written: special tokens from the config, fillers up to the embedding."""
    special = {n: {"content": text, "special": True} for n, text in enumerate(["<unk>", "<s>", "</s>"])}
    tokenizer, model = convert_vocabulary(tmp_path, special, more=64)
    for text in [*TEXTS, *shared("text/tinyshakespeare.txt").read_text()[:20_000].split("\n\n")]:
        assert tokenizer.encode(text) == model.encode(text), text
        assert tokenizer.encode(text, special=True) == model.encode(text, special=True), text
        assert tokenizer.decode(tokenizer.encode(text)) == model.decode(model.encode(text))
    assert tokenizer.vocab == model.vocab
    assert (tokenizer.bos, tokenizer.adds_bos) == (1, True)


def test_tokens_added_beyond_the_vocabulary_are_found(tmp_path):
    size = sentencepiece.SentencePieceProcessor(str(shared("tokenizers/mistral_v3.model"))).vocab_size()
    added = {
        0: {"content": "<unk>", "special": True},
        size: {"content": "<|im_start|>", "special": True},
        size + 1: {"content": "<tool  call>", "special": False},
    }
    tokenizer, _ = convert_vocabulary(tmp_path, added, more=8)
    assert tokenizer.vocab == size + 2
    assert size not in tokenizer.encode("<|im_start|>x")
    assert tokenizer.encode("<|im_start|>x", special=True)[0] == size
    assert size + 1 in tokenizer.encode("x<tool  call>y")
    assert tokenizer.decode(tokenizer.encode("x<tool  call>y")) == "x<tool  call>y"


def test_bytes_typed_as_ordinary_tokens_are_bytes(tmp_path):
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    typed = minimal(tmp_path, [*TOKENS, *names], [*KINDS, *[BYTE] * 256])
    untyped = minimal(tmp_path, [*TOKENS, *names], [*KINDS, *[NORMAL] * 256])
    for tokenizer in (typed, untyped):
        assert tokenizer.encode("aé") == [6, 8 + 0xC3, 8 + 0xA9]
        assert tokenizer.decode([6, 8 + 0xC3, 8 + 0xA9]) == "aé"


def test_a_token_typed_unknown_counts_before_the_key(tmp_path):
    kinds = [CONTROL] * 3 + [UNKNOWN, USER_DEFINED] + [NORMAL] * 3
    assert minimal(tmp_path, kinds=kinds, unknown_token_id=0).encode("c") == [3]


def test_written_models_are_read_by_the_library():
    data = write_model([("<unk>", 0.0, UNKNOWN), ("a", 0.0, NORMAL)], prefix=False, trims=False, bos=None, eos=None)
    assert PieceTokenizer(data, TokenizerConfig(), Path("x")).encode("a") == [1]
