"""Encoding: a text in pieces or parts has the tokens of the whole, and what is put around it."""

import json
import random
from itertools import pairwise

import numpy as np
import pytest
from helpers import default, shared
from test_tokenize import tokenizer_of

from argosy.core.errors import BadInput
from argosy.data import encode as module
from argosy.data.encode import DocumentEncoder
from argosy.data.encoding import Encoding
from argosy.data.pack import Encoded
from argosy.data.sources import Capped, Document
from argosy.data.sources.text import TextFile, TextsInMemory
from argosy.data.tokenizers import Tokenizer
from argosy.data.tokenizers.byte import ByteTokenizer, tokenizer_json
from argosy.data.tokenizers.config import TokenizerConfig
from argosy.data.tokenizers.fast import FastTokenizer
from argosy.data.tokenizers.pieces import PieceTokenizer
from argosy.data.tokenizers.proto import NORMAL, UNKNOWN, USER_DEFINED, write_model

KINDS = [
    "byte",
    "smollm2",
    "gpt2",
    "mistral_v1",
    "mistral_v3",
    "c4_32k",
    "stories260k",
    "bert_uncased",
    "clip",
    "llama2.json",
]


def kind(name: str) -> Tokenizer:
    return prepending() if name == "llama2.json" else tokenizer_of(name)


def prepending(**facts) -> FastTokenizer:
    """A tokenizer.json as Llama 2's: a normalizer puts U+2581 in front, and nothing splits the text into words."""
    content = json.loads(tokenizer_json()) | {"added_tokens": [], "pre_tokenizer": None, "decoder": None}
    steps = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    content["normalizer"] = {"type": "Sequence", "normalizers": steps}
    letters = [
        "▁",
        "<unk>",
        "\n",
        *sorted(set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;'!?&$3-")),
    ]
    merges = [["▁", "t"], ["▁", "a"], ["▁t", "h"], ["▁th", "e"], ["h", "e"], ["▁", "▁"], ["i", "n"]]
    vocab = {token: number for number, token in enumerate([*letters, *("".join(pair) for pair in merges)])}
    content["model"] |= {"vocab": vocab, "merges": merges, "unk_token": "<unk>"}
    return FastTokenizer(json.dumps(content), TokenizerConfig(**facts), shared("tokenizers/golden.json"))


def mixed_text() -> str:
    """English, code, Japanese with few blanks, emoji, runs of blanks and of line breaks."""
    english = shared("text/tinyshakespeare.txt").read_text()[:6_000]
    code = "def f(x):\n    return x  #  twice\n\n\n\tx = 'é' \r\n" * 20
    japanese = "吾輩は猫である。名前はまだ無い。\nどこで生れたか とんと見当がつかぬ。" * 20
    return "\n".join([english, code, japanese, "😀 a👩\u200d💻 b 12 345  6\u3000x\u00a0y " * 20, "  end  "])


def tokens(encoded: list[Encoded]) -> list[int]:
    return [token for piece in encoded for token in piece.tokens.tolist()]


def in_pieces(text: str, seed: int, longest: int = 900) -> list[Document]:
    """The text cut anywhere, as a source of one long document gives it."""
    draw, places = random.Random(seed), [0]
    while places[-1] < len(text):
        places.append(min(len(text), places[-1] + draw.randint(1, longest)))
    return [Document(text[a:b], ends=b == len(text)) for a, b in pairwise(places)]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("special", default(True, of=(False, True)))
def test_a_text_in_pieces_has_the_tokens_of_the_whole(name, special, monkeypatch):
    """SentencePiece would put a space in front of each piece."""
    monkeypatch.setattr(module, "PART_CHARACTERS", 100)
    tokenizer, text = kind(name), mixed_text()
    before = [tokenizer.bos] if tokenizer.adds_bos else []
    after = [] if tokenizer.eos is None else [tokenizer.eos]
    expected = [*before, *tokenizer.encode(text, special), *after]
    for seed in range(3):
        encoder = DocumentEncoder(Encoding(tokenizer, None, special))
        pieces = [piece for document in in_pieces(text, seed) for piece in encoder.encode([document])]
        assert tokens(pieces) == expected
        assert [piece.begins for piece in pieces if len(piece.tokens)].count(True) == 1
    together = list(DocumentEncoder(Encoding(tokenizer, None, special)).encode([*in_pieces(text, 9), Document("more")]))
    assert tokens(together)[: len(expected)] == expected


@pytest.mark.parametrize("name", KINDS)
def test_long_texts_are_encoded_in_parts(name, monkeypatch):
    monkeypatch.setattr(module, "PART_CHARACTERS", 100)
    tokenizer, rests = kind(name), []
    cut, original, text = tokenizer.cut_pattern(), tokenizer.encode_rest, mixed_text()
    monkeypatch.setattr(
        tokenizer, "encode_rest", lambda texts, special: rests.extend(texts) or original(texts, special)
    )
    list(DocumentEncoder(Encoding(tokenizer)).encode([Document(text)]))
    assert len(rests) > 20
    assert text.endswith("".join(rests))
    assert all(cut.match(text, len(text) - len("".join(rests[i:]))) for i in range(len(rests)))


def test_a_text_file_of_sentence_pieces_is_one_text(tmp_path, monkeypatch):
    monkeypatch.setattr("argosy.data.sources.text.PIECE_BYTES", 1000)
    (tmp_path / "a.txt").write_text(mixed_text())
    source, tokenizer = TextFile(tmp_path / "a.txt"), tokenizer_of("mistral_v1")
    documents = list(source.documents())
    assert len(documents) > 5
    assert tokens(list(DocumentEncoder(Encoding(tokenizer)).encode(documents))) == [1, *tokenizer.encode(mixed_text()), 2]


def test_pieces_with_a_blank_inside_forbid_cutting_there():
    """A vocabulary trained across words: no cut is known, so the text waits for its end."""
    pieces = [
        ("<unk>", 0.0, UNKNOWN),
        *((c, -9.0, NORMAL) for c in "▁ab\n"),
        ("b▁a", -1.0, NORMAL),
        ("a▁", -2.0, NORMAL),
    ]
    data = write_model(pieces, prefix=True, trims=False, bos=None, eos=None)
    tokenizer = PieceTokenizer(data, TokenizerConfig(), shared("tokenizers/golden.json"))
    pattern = tokenizer.cut_pattern()
    assert pattern is None or not pattern.search("b a b")
    text = "ab ab ab ba b a" * 30
    assert tokens(list(DocumentEncoder(Encoding(tokenizer)).encode(in_pieces(text, 1, 20)))) == tokenizer.encode(text)


def test_added_tokens_with_a_blank_inside_are_not_cut():
    pieces = [("<unk>", 0.0, UNKNOWN), *((c, -9.0, NORMAL) for c in "▁ab\n"), ("a▁b", -1.0, USER_DEFINED)]
    data = write_model(pieces, prefix=False, trims=False, bos=None, eos=None)
    tokenizer = PieceTokenizer(data, TokenizerConfig(), shared("tokenizers/golden.json"))
    text = "ba ba b\nb " * 40
    assert tokens(list(DocumentEncoder(Encoding(tokenizer)).encode(in_pieces(text, 2, 20)))) == tokenizer.encode(text)


def test_a_text_that_cannot_be_cut_is_refused_in_the_end(monkeypatch):
    monkeypatch.setattr(module, "HELD_CHARACTERS", 1000)
    encoder = DocumentEncoder(Encoding(tokenizer_of("byte")))
    list(encoder.encode([Document("x" * 1000, ends=False)]))
    with pytest.raises(BadInput, match="without a blank"):
        list(encoder.encode([Document("x", ends=False)]))


def test_skipping_pieces_leaves_the_state_of_encoding_them():
    documents = [*in_pieces(mixed_text(), 3), *in_pieces("a short one", 4, 4)]
    tokenizer = tokenizer_of("mistral_v1")
    whole = list(DocumentEncoder(Encoding(tokenizer)).encode(documents))
    for start in (1, 5, len(documents) - 2):
        encoder = DocumentEncoder(Encoding(tokenizer))
        for document in documents[:start]:
            encoder.skip(document)
        assert tokens(list(encoder.encode(documents[start:]))) == tokens(whole[start:])


def test_a_limit_at_the_end_of_a_piece_ends_the_document(tmp_path, monkeypatch):
    monkeypatch.setattr("argosy.data.sources.text.PIECE_BYTES", 100)
    (tmp_path / "a.txt").write_text("some words\n" * 60)
    source = TextFile(tmp_path / "a.txt")
    first = len(next(source.documents()).text)
    for limit in (first, first + 3, 659, 660, 661):
        capped = Capped(source, limit)
        encoded = list(DocumentEncoder(Encoding(ByteTokenizer())).encode(list(capped.documents())))
        assert tokens(encoded) == [*("some words\n" * 60).encode()[:limit], 257]
        assert capped.max_bytes == (limit if limit < 660 else None)


# ---- what is put around a document


def ids(tokenizer: Tokenizer, text: str, bos: bool | None = None, special: bool = False) -> list[int]:
    return tokens(list(DocumentEncoder(Encoding(tokenizer, bos, special)).encode([Document(text)])))


@pytest.mark.parametrize("adds", [True, False, None])
def test_documents_begin_as_prompts_do_by_default(adds):
    tokenizer = ByteTokenizer(TokenizerConfig(adds_bos=adds))
    assert ids(tokenizer, "a") == ([256] if adds else []) + [97, 257]
    assert ids(tokenizer, "a", bos=True) == [256, 97, 257]
    assert ids(tokenizer, "a", bos=False) == [97, 257]


def test_a_document_that_has_its_first_and_last_token_gets_no_second():
    tokenizer = ByteTokenizer(TokenizerConfig(adds_bos=True))
    assert ids(tokenizer, "<bos>a<eos>", special=True) == [256, 97, 257]
    assert ids(tokenizer, "<bos>a", special=False) == [256, *b"<bos>a", 257]
    assert tokens(list(DocumentEncoder(Encoding(tokenizer)).encode([Document(tokens=[256, 97, 257])]))) == [256, 97, 257]


def test_a_tokenizer_without_the_token_is_reported():
    with pytest.raises(BadInput, match="no beginning-of-sequence token"):
        DocumentEncoder(Encoding(tokenizer_of("bert_uncased"), bos=True))


# ---- names of special tokens

CHAT = "<|im_start|>user\nhi<|im_end|>\n"


def test_special_encodes_the_names_of_special_tokens():
    tokenizer = tokenizer_of("smollm2")
    assert ids(tokenizer, CHAT, special=True)[:1] == [1]
    assert 1 not in ids(tokenizer, CHAT)


def test_documents_with_names_of_special_tokens_are_counted_once_each():
    encoder = DocumentEncoder(Encoding(tokenizer_of("smollm2")))
    piece = [Document(f"{CHAT} and ", ends=False), Document(CHAT, ends=False), Document("<|endoftext|>")]
    list(encoder.encode([Document("plain <b>"), Document(CHAT * 3), *piece]))
    assert encoder.special_documents == 2
    assert encoder.special_names == ["<|im_start|>"]
    silent = DocumentEncoder(Encoding(tokenizer_of("smollm2"), special=True))
    list(silent.encode([Document(CHAT)]))
    assert silent.special_documents == 0


def test_weights_of_a_document_may_be_fractions():
    documents = [Document(tokens=[1, 2, 3], weights=[0.5, 0.25, 1.5]), Document(tokens=[4])]
    first, second = DocumentEncoder(Encoding(ByteTokenizer(), bos=True)).encode(documents)
    assert first.weights is not None
    np.testing.assert_array_equal(first.weights, np.array([0, 0.5, 0.25, 1.5, 1.5], np.float32))
    assert second.weights is None
    with pytest.raises(BadInput, match="2 weights"):
        list(DocumentEncoder(Encoding(ByteTokenizer())).encode([Document(tokens=[1], weights=[1.0, 2.0])]))


def test_memory_tells_weights_apart():
    first, other = (TextsInMemory([Document(tokens=[1, 2], weights=[1.0, w])]).fingerprint() for w in (0.5, 0.25))
    assert first != other
