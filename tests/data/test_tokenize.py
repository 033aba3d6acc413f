"""Every kind of tokenizer against its reference library, and laws that hold for all of them.

The goldens were made with tokenizers, tiktoken, sentencepiece and llama.cpp; see the README of the shared data.
"""

import base64
import json
import os
import random
import threading
from pathlib import Path

import pytest
import sentencepiece
from helpers import default, shared
from tokenizers import Tokenizer as Library

from argosy.core.errors import BadInput, Damaged, Unsupported
from argosy.core.formats.gguf import GGUF
from argosy.data.framing import frame_ids, frame_of
from argosy.data.tokenizers.byte import tokenizer_json
from argosy.data.tokenizers.config import TokenizerConfig
from argosy.data.tokenizers.convert import byte_bpe
from argosy.data.tokenizers.decoders import BYTES, decoding
from argosy.data.tokenizers.fast import FastTokenizer
from argosy.data.tokenizers.gguf import VocabularyTables, byte_level, sentence_pieces
from argosy.data.tokenizers.load import Tokenizer, find_tokenizer, load_tokenizer
from argosy.data.tokenizers.rules import RULES, SplitRule, pre_tokenizer
from argosy.data.tokenizers.train import train

FILES = {  # name in golden.json -> what `load_tokenizer` is given
    "smollm2": "tokenizers/smollm2",
    "gpt2": "tokenizers/gpt2",
    "cl100k_base": "tokenizers/cl100k_base.tiktoken",
    "qwen": "tokenizers/qwen.tiktoken",
    "mistral_v1": "tokenizers/mistral_v1.model",
    "mistral_v3": "tokenizers/mistral_v3.model",
    "c4_32k": "tokenizers/c4_32k.model",
    "stories260k": "models/stories260k",
    "bert_uncased": "tokenizers/bert_uncased_vocab.txt",
    "clip": "tokenizers/clip_bpe_simple_vocab_16e6.txt.gz",
}
PIECES = ["mistral_v1", "mistral_v3", "c4_32k", "stories260k"]
LOADED: dict[str, Tokenizer] = {}


def tokenizer_of(name: str) -> Tokenizer:
    """Loaded once: tiktoken's ranks take two seconds."""
    if name not in LOADED:
        spec = {"byte": "byte", "gpt2.gguf": "tokenizers/gguf/ggml-vocab-gpt-2.gguf",
                "stories260k.gguf": "gguf/stories260K-f32.gguf"} | FILES  # fmt: skip
        LOADED[name] = load_tokenizer(name if name == "byte" else shared(spec[name]))
    return LOADED[name]


def golden(name: str) -> tuple[list[str], list[list[int]], list[str]]:
    document = json.loads(shared("tokenizers/golden.json").read_text())
    entry = document["tokenizers"][name]
    return document["texts"], entry["ids"], entry["decoded"]


def attributes(tokenizer: Tokenizer) -> dict:
    names = ("vocab", "bos", "eos", "pad", "adds_bos", "special", "chat_template", "chat_templates", "fingerprint")
    return {name: getattr(tokenizer, name) for name in names}


def random_ids(rng: random.Random, vocab: int) -> list[int]:
    """Mostly low ids, where bytes and control pieces are."""
    return [rng.randrange(vocab if rng.random() < 0.4 else min(vocab, 300)) for _ in range(rng.randrange(14))]


# ---- against the references


def test_every_golden_vocabulary_is_tested():
    assert set(json.loads(shared("tokenizers/golden.json").read_text())["tokenizers"]) == set(FILES)


@pytest.mark.parametrize("name", default(*(name for name in FILES if name != "qwen"), of=FILES))
def test_ids_and_text_equal_the_goldens(name):
    tokenizer = tokenizer_of(name)
    texts, ids, decoded = golden(name)
    assert [tokenizer.encode(text) for text in texts] == ids
    assert tokenizer.encode_many(texts) == ids
    assert [tokenizer.decode(tokens) for tokens in ids] == decoded


@pytest.mark.parametrize("name", ["gpt-2", "bert-bge"])
def test_gguf_ids_equal_those_of_llama_cpp(name):
    path = shared(f"tokenizers/gguf/ggml-vocab-{name}.gguf")
    texts = shared(f"tokenizers/gguf/ggml-vocab-{name}.gguf.inp").read_text().split("\n__ggml_vocab_test__\n")
    lines = shared(f"tokenizers/gguf/ggml-vocab-{name}.gguf.out").read_text().split("\n")
    tokenizer = load_tokenizer(path)
    assert [tokenizer.encode(text) for text in texts] == [
        [int(n) for n in line.split()] for line in lines[: len(texts)]
    ]


def test_gguf_of_sentence_pieces_equals_the_model_it_was_made_from():
    """But for the treatment of runs of spaces, which the file does not state."""
    texts, ids, _ = golden("stories260k")
    tokenizer = tokenizer_of("stories260k.gguf")
    plain = [
        (text, tokens)
        for text, tokens in zip(texts, ids)
        if text == " ".join(text.split(" ")).strip(" ") and "  " not in text
    ]
    assert len(plain) > 40
    assert [tokenizer.encode(text) for text, _ in plain] == [tokens for _, tokens in plain]
    assert (tokenizer.bos, tokenizer.eos, tokenizer.adds_bos) == (1, 2, True)


def test_gguf_names_its_rule_and_the_name_counts():
    """The rule of `smollm` on the tables of GPT-2 gives each digit alone; the wrong rule joins them."""
    meta = dict(GGUF.open(shared("tokenizers/gguf/ggml-vocab-gpt-2.gguf")).meta)
    words = {}
    for name in ("gpt-2", "smollm"):
        tables = VocabularyTables(meta | {"tokenizer.ggml.pre": name}, Path("x.gguf"))
        tokenizer = byte_level(tables)
        words[name] = [tokenizer.decode([token]) for token in tokenizer.encode("in 2024")]
    assert words == {"gpt-2": ["in", " 2024"], "smollm": ["in", " ", "2", "0", "2", "4"]}
    with pytest.raises(BadInput, match="smolm") as caught:
        byte_level(VocabularyTables(meta | {"tokenizer.ggml.pre": "smolm"}, Path("x.gguf")))
    assert "smollm" in str(caught.value.hint)


def test_smollm2_gguf_equals_its_tokenizer_json():
    if not (path := os.environ.get("ARGOSY_TEST_SMOLLM2_GGUF")):
        pytest.skip("ARGOSY_TEST_SMOLLM2_GGUF names no file")
    inside, tokenizer = load_tokenizer(path), tokenizer_of("smollm2")
    texts = [*golden("smollm2")[0], "\n\n1. First", "<|im_start|>user\n1 + 1<|im_end|>"]
    assert [inside.encode(text) for text in texts] == [tokenizer.encode(text) for text in texts]
    assert inside.encode(texts[-1], special=True) == tokenizer.encode(texts[-1], special=True)
    assert inside.encode("\n\n1. First") == [1116, 33, 30, 3508]
    assert (inside.bos, inside.eos, inside.pad, inside.adds_bos) == (
        tokenizer.bos,
        tokenizer.eos,
        tokenizer.pad,
        tokenizer.adds_bos,
    )
    assert inside.chat_template == tokenizer.chat_template


@pytest.mark.parametrize("name", ["smollm2", "gpt2", "bert_uncased"])
@pytest.mark.parametrize("skip", [True, False])
def test_decoding_equals_the_library(name, skip, tmp_path):
    tokenizer = tokenizer_of(name)
    tokenizer.save(tmp_path)
    library = Library.from_file(str(tmp_path / "tokenizer.json"))
    rng = random.Random(0)
    for _ in range(500):
        ids = random_ids(rng, tokenizer.vocab)
        assert tokenizer.decode(ids, skip) == library.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", PIECES)
def test_decoding_equals_sentencepiece(name):
    tokenizer, path = tokenizer_of(name), shared(FILES[name])
    library = sentencepiece.SentencePieceProcessor(str(path / "tokenizer.model" if path.is_dir() else path))
    rng = random.Random(0)
    for _ in range(1000):
        ids = [token for token in random_ids(rng, tokenizer.vocab) if not library.is_control(token)]
        assert tokenizer.decode(ids) == library.decode(ids)


@pytest.mark.parametrize("spec", [
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": True},
    {"type": "WordPiece", "prefix": "##", "cleanup": True},
    {"type": "WordPiece", "prefix": "##", "cleanup": False},
    {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
    {"type": "Strip", "content": "_", "start": 1, "stop": 1},
    None,
], ids=str)  # fmt: skip
def test_every_decoder_equals_the_library(spec):
    tokens = ["▁a", "b", "▁▁c", "##d", "##'s", "n't", ".", "'s", "▁", "<0xC3>", "<0xA9>", "_e_", "__f", "é"]
    content = json.loads(tokenizer_json()) | {"added_tokens": [], "pre_tokenizer": None, "decoder": spec}
    content["model"]["vocab"] = {token: number for number, token in enumerate(tokens)}
    tokenizer = FastTokenizer(json.dumps(content), TokenizerConfig(), Path("tokenizer.json"))
    library, rng = Library.from_str(json.dumps(content)), random.Random(0)
    good = [[number] for number in range(len(tokens))] + [[9, 10], [0, 9, 10, 0], [8, 0], [8, 8]]
    for ids in good + [[n for n in random_ids(rng, len(tokens)) if n not in (9, 10)] for _ in range(200)]:
        assert tokenizer.decode(ids) == library.decode(ids), ids
    assert tokenizer.decode([9, 0]).startswith("\ufffd") or spec is None or "ByteFallback" not in str(spec)


def test_a_bad_byte_spoils_no_good_character():
    """Where the library would: one bad byte among bytes costs the whole run there."""
    tokenizer = tokenizer_of("stories260k")
    ids = [3 + byte for byte in "é".encode() + b"\xff" + "é".encode()]
    assert tokenizer.decode(ids) == "é\ufffdé"


def test_unknown_decoders_are_refused():
    with pytest.raises(Unsupported, match="CTC"):
        decoding({"type": "CTC"}, Path("tokenizer.json"))


# ---- laws


ALL = [
    "byte",
    "smollm2",
    "gpt2",
    "mistral_v3",
    "c4_32k",
    "stories260k",
    "bert_uncased",
    "clip",
    "qwen",
    "gpt2.gguf",
    "stories260k.gguf",
]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("skip", default(False, of=(True, False)))
def test_a_stream_joins_to_the_decoding_of_all(name, skip):
    tokenizer, rng = tokenizer_of(name), random.Random(1)
    cases = [random_ids(rng, tokenizer.vocab) for _ in range(200)]
    cases += [tokenizer.encode(rng.randbytes(rng.randrange(30)).decode("latin-1")) for _ in range(50)]
    for ids in cases:
        stream = tokenizer.stream(skip)
        assert "".join([stream.push(token) for token in ids]) + stream.end() == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("name", [name for name in ALL if name not in ("bert_uncased", "clip")])  # they change the text
def test_a_stream_never_shows_half_a_character(name):
    tokenizer = tokenizer_of(name)
    for text in ("日本語のテキスト", "🎉😀 👩\u200d💻", "naïve Zürich"):
        ids = tokenizer.encode(text)
        stream, whole, streamed = tokenizer.stream(), tokenizer.decode(ids), ""
        for token in ids:
            streamed += stream.push(token)
            assert whole.startswith(streamed)
        assert "\ufffd" not in streamed + stream.end()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("special", [False, True])
def test_offsets_are_those_of_the_same_ids(name, special):
    """They go on through the text and name the characters that a token alone decodes to."""
    tokenizer = tokenizer_of(name)
    for text in [*golden("gpt2")[0], "a<|im_end|>b</s> c<s>", "日<|endoftext|>é <eos>x"]:
        ids, spans = tokenizer.encode_with_offsets(text, special)
        assert ids == tokenizer.encode(text, special)
        assert len(spans) == len(ids)
        assert spans == sorted(spans) or name in ("bert_uncased", "qwen")  # normal forms may change the order of marks
        assert all(0 <= begin <= end <= len(text) for begin, end in spans)
        for token, (begin, end) in zip(ids, spans):
            alone = tokenizer.decode([token], skip_special=False).strip().removeprefix("##").lower()
            if text.isascii() and "⁇" not in alone:
                assert alone in text[begin:end].lower()
        if text.isascii() and name not in ("bert_uncased", "c4_32k"):  # which drop control characters
            covered = {place for begin, end in spans for place in range(begin, end)}
            assert all(place in covered or c.isspace() for place, c in enumerate(text))


@pytest.mark.parametrize("name", ["byte", "gpt2", "mistral_v3"])
def test_any_text_comes_back(name):
    tokenizer, rng = tokenizer_of(name), random.Random(2)
    for _ in range(300):
        text = "".join(
            chr(rng.choice([rng.randrange(128), rng.randrange(0x800), rng.randrange(0x10000, 0x11000)]))
            for _ in range(20)
        )
        if name != "mistral_v3" or "▁" not in text:  # SentencePiece writes spaces as this
            assert tokenizer.decode(tokenizer.encode(text)) == text


# The others take seconds to save and read again.
SMALL = ("byte", "smollm2", "clip", "stories260k", "stories260k.gguf")


@pytest.mark.parametrize(
    "name",
    default(*SMALL, of=["byte", *FILES, "gpt2.gguf", "stories260k.gguf"]),
)
def test_a_saved_tokenizer_comes_back_equal(name, tmp_path):
    tokenizer = tokenizer_of(name)
    tokenizer.save(tmp_path / "tokenizer")
    again = find_tokenizer(tmp_path)  # as in a run directory
    assert again is not None
    assert attributes(again) == attributes(tokenizer)
    text = "<s>a <|im_start|> <bos>\n\n1. é<|endoftext|>"
    assert again.encode(text, special=True) == tokenizer.encode(text, special=True)


@pytest.mark.parametrize("name", [*(pytest.param(n, marks=pytest.mark.slow if n == "cl100k_base" else ()) for n in ("byte", *FILES))])
def test_ids_are_below_the_vocabulary_and_no_id_breaks_decoding(name):
    tokenizer = tokenizer_of(name)
    assert all(token < tokenizer.vocab for text in golden("gpt2")[0] for token in tokenizer.encode(text))
    assert tokenizer.decode([tokenizer.vocab, tokenizer.vocab + 100, -1, 2**40]) == ""


@pytest.mark.parametrize("name", ["byte", "smollm2", "mistral_v1"])
def test_lone_surrogates_become_replacement_characters(name):
    tokenizer = tokenizer_of(name)
    assert tokenizer.encode("a\ud800b") == tokenizer.encode("a\ufffdb") == tokenizer.encode_many(["a\ud800b"])[0]


# ---- special tokens


@pytest.mark.parametrize(("name", "text", "id"), [
    ("byte", "<eos>", 257), ("smollm2", "<|im_end|>", 2), ("gpt2", "<|endoftext|>", 50256),
    ("mistral_v1", "</s>", 2), ("mistral_v3", "[INST]", 3), ("stories260k", "<s>", 1),
])  # fmt: skip
def test_text_that_looks_special_is_text_unless_asked_for(name, text, id):
    tokenizer = tokenizer_of(name)
    plain = tokenizer.encode(f"a{text}b")
    assert id not in plain
    assert tokenizer.decode(plain) == f"a{text}b"
    assert tokenizer.encode_many([f"a{text}b"]) == [plain]
    parsed = tokenizer.encode(f"a{text}b", special=True)
    assert parsed.count(id) == 1
    assert tokenizer.decode(parsed).replace(" ", "") == "ab"
    assert text in tokenizer.decode(parsed, skip_special=False)


def test_mistral_prompt_equals_the_published_ids():
    """`[INST]` after `<s>` begins with a space: 733, 16289, 28793 in the first Mistral."""
    assert tokenizer_of("mistral_v1").encode("<s>[INST]", special=True) == [1, 733, 16289, 28793]


def test_parts_after_a_special_token_join_where_the_config_is_not_legacy(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(shared("tokenizers/mistral_v1.model").read_bytes())
    ids = {}
    for legacy in (True, False):
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "LlamaTokenizer", "legacy": legacy})
        )
        ids[legacy] = load_tokenizer(tmp_path).encode("Hi<s>Hi", special=True)
    hi, joined = tokenizer_of("mistral_v1").encode("Hi"), tokenizer_of("mistral_v1").encode("aHi")[-1:]
    assert ids == {True: [*hi, 1, *hi], False: [*hi, 1, *joined]}


@pytest.mark.parametrize(
    ("config", "adds"), [({"add_bos_token": True}, True), ({"add_bos_token": False}, False), ({}, None)]
)
def test_whether_a_text_begins_with_bos(config, adds, tmp_path):
    """The config says so; else the post-processor of tokenizer.json does; else the convention of SentencePiece."""
    content = json.loads(tokenizer_json())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [256], "tokens": ["<bos>"]}},
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>"} | config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.adds_bos is (True if adds is None else adds)
    assert tokenizer.encode("a") == [97]  # never added here
    assert tokenizer_of("c4_32k").adds_bos is False
    assert tokenizer_of("mistral_v1").adds_bos is True


def test_special_tokens_and_templates_come_from_every_place_the_hub_has(tmp_path):
    (tmp_path / "tokenizer.json").write_text(tokenizer_json() + " ")
    config = {
        "bos_token": {"__type": "AddedToken", "content": "<bos>"}, "pad_token": "[NOWHERE]",
        "chat_template": [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}],
        "added_tokens_decoder": {"258": {"content": "<new>", "special": True}},
    }  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<eos>"}))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == (256, 257, None)
    assert tokenizer.special["eos_token"] == "<eos>"
    assert tokenizer.chat_templates == {"default": "one", "tool_use": "two"}
    assert tokenizer.encode("<new>", special=True) == [258]
    assert tokenizer.vocab == 259
    (tmp_path / "chat_template.jinja").write_text("three")
    assert load_tokenizer(tmp_path).chat_template == "three"
    tokenizer.save(tmp_path / "again")
    assert attributes(load_tokenizer(tmp_path / "again")) == attributes(tokenizer)


def test_an_added_token_that_cannot_have_its_id_is_damage(tmp_path):
    (tmp_path / "tokenizer.json").write_text(tokenizer_json() + " ")
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<far>": 9000}))
    with pytest.raises(Damaged, match="9000"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("place", ["additional_special_tokens", "extra_special_tokens"])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_special_tokens_without_a_role(place, file, tmp_path):
    """Named in a list: found in rendered chats, hidden from decoded text, text where nobody asks."""
    content = json.loads(tokenizer_json())
    content["model"]["vocab"]["<|turn|>"] = 258
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / file).write_text(json.dumps({place: [{"content": "<|turn|>"}, "<|nowhere|>"]}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("a<|turn|>", special=True) == [97, 258]
    assert 258 not in tokenizer.encode("a<|turn|>")
    assert tokenizer.decode([97, 258]) == "a"
    tokenizer.save(tmp_path / "again")
    assert attributes(load_tokenizer(tmp_path / "again")) == attributes(tokenizer)


CLASSES = [(None, "gpt2"), ("GPT2Tokenizer", "gpt2"), ("CLIPTokenizer", "clip"), ("Qwen2TokenizerFast", "qwen")]


@pytest.mark.parametrize(("kind", "reference"), default(*CLASSES[:1], of=CLASSES))
def test_vocab_and_merges_are_read_as_their_class_says(kind, reference, tmp_path):
    """The two files of each, written out of its other form."""
    content = json.loads(tokenizer_of(reference)._text)["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(content["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    if kind:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    tokenizer = load_tokenizer(tmp_path)
    texts, ids, decoded = golden(reference)
    assert [tokenizer.encode(text) for text in texts] == ids
    assert [tokenizer.decode(tokens) for tokens in ids] == decoded
    assert tokenizer.special["eos_token"] == "<|endoftext|>"


def test_vocab_and_merges_of_an_unknown_class_are_refused(tmp_path):
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "merges.txt").write_text("")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen3Tokenizer"}))
    with pytest.raises(BadInput, match="Qwen3") as caught:
        load_tokenizer(tmp_path)
    assert "Qwen2" in str(caught.value.hint)


def test_a_line_of_vocab_txt_ends_at_a_newline_only(tmp_path):
    """Multilingual vocabularies hold U+2028 and U+0085 as tokens; splitting there would shift every id that follows."""
    (tmp_path / "vocab.txt").write_bytes("[UNK]\r\n\u2028\n\x85\na\n".encode())
    assert load_tokenizer(tmp_path).encode("a") == [3]
    assert load_tokenizer(tmp_path).vocab == 4


@pytest.mark.parametrize(("name", "token", "id", "vocab"), [
    ("cl100k_base", "<|fim_prefix|>", 100_258, 100_277), ("cl100k_base", "<|endofprompt|>", 100_276, 100_277),
    ("qwen", "<|im_start|>", 151_644, 151_851), ("qwen", "<|im_end|>", 151_645, 151_851),
    ("clip", "<|startoftext|>", 49_406, 49_408),
])  # fmt: skip
def test_special_tokens_of_files_that_do_not_hold_them(name, token, id, vocab):
    """As published: tiktoken_ext/openai_public.py, Qwen's tokenization_qwen.py, CLIP's simple_tokenizer.py."""
    tokenizer = tokenizer_of(name)
    assert tokenizer.encode(f"{token}", special=True) == [id]
    assert tokenizer.decode([id]) == ""
    assert tokenizer.vocab == vocab
    assert id not in tokenizer.encode(token)


def ranks_of(words: list[bytes]) -> str:
    tokens = [*(bytes([byte]) for byte in range(256)), *words]
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))


def test_a_folder_of_kimi(tmp_path):
    """Han by itself, digits by threes; 256 special ids after the ranks, some named by the config."""
    words = ["你", "好", "你好", " a", " 你", "12", "123"]
    (tmp_path / "tiktoken.model").write_text(ranks_of([*map(str.encode, words), "你".encode()[:2]]))
    config = {
        "added_tokens_decoder": {"264": {"content": "[BOS]", "special": True}, "266": {"content": "<|im_end|>"}},
        "bos_token": "[BOS]", "eos_token": "<|im_end|>", "chat_template": "x",
    }  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.vocab, tokenizer.bos, tokenizer.eos) == (520, 264, 266)
    assert tokenizer.encode("你好") == [258]
    assert tokenizer.encode("1234 a") == [262, 52, 259]
    assert tokenizer.encode(" 你") == [32, 256]  # never one piece with the space in front, though it has a rank
    assert tokenizer.encode("[BOS]a<|reserved_token_265|><|im_end|>", special=True) == [264, 97, 265, 266]
    tokenizer.save(tmp_path / "again")
    assert attributes(load_tokenizer(tmp_path / "again")) == attributes(tokenizer)


def test_a_folder_of_tiktoken_ranks(tmp_path):
    (tmp_path / "qwen.tiktoken").write_text(ranks_of([b" a"]))
    assert load_tokenizer(tmp_path).encode("b a<|im_end|>", special=True) == [98, 256, 259]


def test_ranks_called_tokenizer_model_are_named(tmp_path):
    """Meta's own Llama 3: a file of ranks under SentencePiece's name, whose rule is said nowhere."""
    (tmp_path / "tokenizer.model").write_text(ranks_of([]))
    with pytest.raises(BadInput, match=r"tokenizer\.model"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", RULES)
def test_rules_cut_everywhere_and_lose_nothing(name):
    """Each is an expression that the library takes; joined, the pieces are the text."""
    content = json.loads(tokenizer_json()) | {"pre_tokenizer": pre_tokenizer(RULES[name])}
    library = Library.from_str(json.dumps(content))
    for text in golden("gpt2")[0]:
        pieces = library.pre_tokenizer.pre_tokenize_str(text)
        assert "".join(text[begin:end] for _, (begin, end) in pieces if begin < end) == text or not text.isascii()
        assert bytes(BYTES[c] for piece, _ in pieces for c in piece) == text.encode()


@pytest.mark.parametrize(("name", "pieces"), [
    ("gpt-2", "I|'m| 12345| fooBar| 日本のab|  | x|\n|\n|y|!!|\n"),
    ("smollm", "I|'m| |1|2|3|4|5| fooBar| 日本のab|  | x|\n|\n|y|!!|\n"),
    ("llama-bpe", "I|'m| |123|45| fooBar| 日本のab|  | x|\n\n|y|!!\n"),
    ("qwen2", "I|'m| |1|2|3|4|5| fooBar| 日本のab|  | x|\n\n|y|!!\n"),
    ("gpt-4o", "I'm| |123|45| foo|Bar| 日本のab|  | x|\n\n|y|!!\n"),
    ("tekken", "I|'m| |1|2|3|4|5| foo|Bar| 日本のab|  | x|\n\n|y|!!\n"),
    ("kimi-k2", "I'm| |123|45| foo|Bar| |日本|のab|  | x|\n\n|y|!!\n"),
    ("deepseek-llm", "I|'|m| |12345| fooBar| |日本の|ab|  | x|\n|\n|y|!!|\n"),
    ("deepseek-coder", "I|'|m| |1|2|3|4|5| fooBar| |日本の|ab|  | x|\n|\n|y|!!|\n"),
    ("deepseek-v3", "I|'m| |123|45| fooBar| |日本の|ab|  | x|\n\n|y|!!\n"),
])  # fmt: skip
def test_each_family_cuts_in_its_own_way(name, pieces):
    """By hand from the expressions, where the families differ: quotes, numbers, case, Han and kana, blanks, lines."""
    content = json.loads(tokenizer_json()) | {"pre_tokenizer": pre_tokenizer(RULES[name])}
    library = Library.from_str(json.dumps(content))
    parts = library.pre_tokenizer.pre_tokenize_str(pieces.replace("|", ""))
    assert "|".join(bytes(BYTES[c] for c in piece).decode() for piece, _ in parts) == pieces


# ---- what else decides


@pytest.mark.slow
def test_the_fingerprint_is_of_the_content_and_not_of_its_spelling():
    path = shared("tokenizers/smollm2/tokenizer.json")
    content = json.loads(path.read_text())
    content["model"]["merges"] = [
        merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]
    ]
    facts = TokenizerConfig(tokenizer_of("smollm2").special)
    spelt = FastTokenizer(json.dumps(content, indent=4, sort_keys=True), facts, path)
    assert spelt.fingerprint == tokenizer_of("smollm2").fingerprint
    content["pre_tokenizer"] = pre_tokenizer(RULES["gpt-2"])
    assert FastTokenizer(json.dumps(content), facts, path).fingerprint != spelt.fingerprint
    assert tokenizer_of("gpt2.gguf").fingerprint == tokenizer_of("gpt2").fingerprint  # equal, wherever they come from
    others = [tokenizer_of(name).fingerprint for name in ALL if name != "gpt2.gguf"]
    assert len(set(others)) == len(others)


def test_bytes_without_a_token_are_known():
    """The list that the shared data's README gives; GPT-2 lacks none."""
    expected = [4, 6, 19, 20, 22, 29, 192, 193, 241, 242, *range(245, 256)]
    assert tokenizer_of("smollm2").missing_bytes == expected
    assert tokenizer_of("gpt2").missing_bytes == tokenizer_of("byte").missing_bytes == []


def test_cutting_and_padding_that_a_file_asks_for_are_left_out(tmp_path):
    content = json.loads(tokenizer_json())
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "!",
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(tmp_path / "tokenizer.json").encode("abc") == [97, 98, 99]


def test_the_saved_byte_tokenizer_serves_other_programs(tmp_path):
    tokenizer_of("byte").save(tmp_path)
    library = Library.from_file(str(tmp_path / "tokenizer.json"))
    for text in golden("gpt2")[0]:
        assert library.encode(text).ids == list(text.encode())
    assert library.decode(library.encode("é<eos>").ids, skip_special_tokens=False) == "é<eos>"


def test_threads_do_not_disturb_each_other():
    tokenizer, wrong = tokenizer_of("smollm2"), []

    def work(special: bool) -> None:
        for _ in range(300):
            if (2 in tokenizer.encode("a<|im_end|>", special)) != special:
                wrong.append(special)

    threads = [threading.Thread(target=work, args=[special]) for special in (True, False) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- training


def test_a_trained_vocabulary_is_the_same_every_time_and_loses_nothing(tmp_path):
    text = shared("text/tinyshakespeare.txt").read_text()[:200_000]
    lines = text.splitlines(keepends=True)
    tokenizer, again = train(lines, 600), train(lines, 600)
    assert attributes(tokenizer) == attributes(again)
    assert (tokenizer.vocab, tokenizer.bos, tokenizer.eos, tokenizer.adds_bos) == (600, 0, 1, False)
    tokenizer.save(tmp_path)
    assert attributes(load_tokenizer(tmp_path)) == attributes(tokenizer)
    odd = text[:1000] + "日本 🎉 \x00\x07 <|eos|>"
    assert tokenizer.decode(tokenizer.encode(odd)) == odd
    assert len(tokenizer.encode(text)) < 0.6 * len(text)


def test_a_vocabulary_must_hold_the_bytes_and_come_from_text():
    with pytest.raises(BadInput, match="257"):
        train(["text"], 257)
    with pytest.raises(BadInput, match="no text"):
        train(["", ""], 300)


# ---- hostile and wrong files


@pytest.mark.parametrize(("name", "content"), [
    ("tokenizer.json", b""), ("tokenizer.json", b"[" * 100_000), ("tokenizer.json", b"{}"),
    ("tokenizer.json", b"\xff\xfe"),
    ("tokenizer.json", b'{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}'),
    ("tokenizer.model", b""), ("tokenizer.model", b"\x0a\xff\xff\xff\xff\x0f"), ("tokenizer.model", b"text"),
    ("tokenizer.model", b"\x0a\x05\x0a\x03abc"), ("x.gguf", b"GGUF"), ("x.tiktoken", b"!!! 0"),
], ids=str)  # fmt: skip
def test_damaged_files_end_in_one_error(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises((Damaged, BadInput)) as caught:
        load_tokenizer(tmp_path / name)
    assert len(str(caught.value).splitlines()) <= 5


@pytest.mark.parametrize("name", ["models/stories260k/tokenizer.model", "gguf/stories260K-f32.gguf"])
def test_flipped_bytes_never_crash(name, tmp_path):
    """Either it still is a tokenizer, or it is told why not: nothing else may come out."""
    source, rng = shared(name), random.Random(3)
    data, path = source.read_bytes(), tmp_path / source.name
    for _ in range(150):
        flipped = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            flipped[rng.randrange(min(len(data), 12_000))] = rng.randrange(256)
        path.write_bytes(flipped[: rng.choice([len(data), rng.randrange(1, len(data))])])
        try:
            tokenizer = find_tokenizer(path)
        except (Damaged, BadInput, Unsupported):
            continue
        if tokenizer is not None:
            tokenizer.decode(tokenizer.encode("héllo <s> 日本", special=True))


@pytest.mark.parametrize(("key", "value"), [
    ("tokens", []), ("tokens", ["a", "a"]), ("token_type", None), ("bos_token_id", 9_999), ("scores", None),
])  # fmt: skip
def test_gguf_tables_that_contradict_each_other(key, value):
    meta = dict(GGUF.open(shared("gguf/stories260K-f32.gguf")).meta)
    values = meta[f"tokenizer.ggml.{key}"]
    meta[f"tokenizer.ggml.{key}"] = values[:-1] if value is None else value
    with pytest.raises(Damaged):
        sentence_pieces(VocabularyTables(meta, Path("x.gguf")))


def test_a_hostile_expression_does_not_run_forever(capfd):
    vocab = json.loads(tokenizer_json())["model"]["vocab"]
    tokenizer = FastTokenizer(byte_bpe(vocab, [], SplitRule(("(a+)+$",)), []), TokenizerConfig(), Path("tokenizer.json"))
    with pytest.raises(Damaged, match="retry-limit"):
        tokenizer.encode("a" * 50 + "!")
    capfd.readouterr()  # the library prints its panic


def test_an_unknown_gguf_kind_is_named(monkeypatch, tmp_path):
    from argosy.data.tokenizers import gguf

    class Opened:
        meta = {"tokenizer.ggml.model": "rwkv"}  # noqa: RUF012

    monkeypatch.setattr(gguf.GGUF, "open", lambda path: Opened)
    with pytest.raises(Unsupported, match="rwkv"):
        gguf.read_gguf(tmp_path / "x.gguf")


@pytest.mark.parametrize("make", [
    lambda folder: folder / "nothing", lambda folder: folder, lambda folder: _touch(folder / "weights.bin"),
    lambda folder: _touch(folder / "unheard_of.tiktoken"),
])  # fmt: skip
def test_what_is_no_tokenizer_is_reported_so(make, tmp_path):
    with pytest.raises(BadInput):
        load_tokenizer(make(tmp_path))


def test_a_folder_without_tokenizer_files_has_none(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert find_tokenizer(tmp_path) is None


def _touch(path: Path) -> Path:
    path.write_bytes(b"")
    return path


def test_a_vocabulary_of_word_pieces_is_saved_with_its_frame(tmp_path):
    """A vocab.txt leaves the frame to the class of the tokenizer; another library has only the file."""
    tokenizer = tokenizer_of("bert_uncased")
    tokenizer.save(tmp_path)
    library = Library.from_file(str(tmp_path / "tokenizer.json"))
    encoding = library.encode("A horse.", "Two.")
    frame = frame_of(tokenizer)
    ids, second = frame_ids(frame, tokenizer.encode("A horse."), tokenizer.encode("Two."))
    assert encoding.ids == ids
    assert encoding.type_ids == [0] * second + [1] * (len(ids) - second)
    assert library.encode("A horse.").ids == frame_ids(frame, tokenizer.encode("A horse."))[0]
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"] == "BertTokenizer"
