"""The small files of a model travel with it: loaded, saved and loaded again, every kind of tokenizer encodes, decodes and renders
a chat alike."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import write_vocabulary
from helpers import shared

from argosy.checkpoint.open import open_model
from argosy.checkpoint.save import write_model_folder
from argosy.core.formats import Arrays
from argosy.data.tokenizers.byte import byte_names
from argosy.data.tokenizers.load import Tokenizer, find_tokenizer, load_tokenizer, matching
from argosy.models.llama import LlamaConfig
from argosy.weights.build import stored_tokenizer
from argosy.weights.hub.writer import companion_files
from argosy.weights.model import COMPANIONS

CHAT = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
MESSAGES = [{"role": "user", "content": "a  b"}, {"role": "assistant", "content": "é"}]
TEXTS = ["a b ab", "Hello  there,\n\n日本 é", "<|im_end|></s><eos><s>[SEP]"]
CONFIG = LlamaConfig(vocab=1024, width=8, layers=1, ffn=8, heads=1, kv_heads=1, context=16, tied=True)


def config(folder: Path, **more: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT} | more))


def byte(folder: Path) -> None:
    load_tokenizer("byte").save(folder)
    config(folder, bos_token="<bos>", eos_token="<eos>")


def tokenizer_json(folder: Path) -> None:
    content = json.loads(shared("tokenizers/smollm2/tokenizer.json").read_text())
    keep = {token for token, number in content["model"]["vocab"].items() if number < 1000}
    content["model"]["vocab"] = {token: n for token, n in content["model"]["vocab"].items() if token in keep}
    pairs = [m.split(" ", 1) if isinstance(m, str) else m for m in content["model"]["merges"]]
    content["model"]["merges"] = [pair for pair in pairs if {*pair, "".join(pair)} <= keep]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    config(folder, eos_token="<|im_end|>", bos_token="<|im_start|>")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("RAG {{ messages[0].content }}")


def sentence_pieces(folder: Path) -> None:
    (folder / "tokenizer.model").write_bytes(shared("models/stories260k/tokenizer.model").read_bytes())
    config(folder)
    (folder / "chat_template.jinja").write_text(CHAT + "!")
    (folder / "added_tokens.json").write_text(json.dumps({"<|im_end|>": 512}))


def ranks(folder: Path, name: str) -> None:
    tokens = [*(bytes([number]) for number in range(256)), b" a", b"ab"]
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (folder / name).write_text("".join(lines))
    config(folder, eos_token="<|endoftext|>")


def pairs(folder: Path) -> None:
    vocab = {name: number for number, name in enumerate(byte_names().values())} | {"Ġa": 256, "<|endoftext|>": 257}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\nĠ a\n")
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    config(folder, tokenizer_class="GPT2Tokenizer")


def words(folder: Path) -> None:
    (folder / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "##b", "hello", "there", ","])
    )
    config(folder, do_lower_case=True)


def gguf(folder: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "ab", "  "]
    kinds = [2, 3, 3, *[6] * 256, 1, 1, 1, 1, 4]
    write_vocabulary(folder / "model.gguf", tokens, kinds, [0.0] * len(tokens), bos_token_id=1, eos_token_id=2)


KINDS: dict[str, Callable[[Path], None]] = {
    "byte": byte,
    "tokenizer.json": tokenizer_json,
    "SentencePiece": sentence_pieces,
    "tiktoken.model": lambda folder: ranks(folder, "tiktoken.model"),
    "qwen.tiktoken": lambda folder: ranks(folder, "qwen.tiktoken"),
    "r50k_mine.tiktoken": lambda folder: ranks(folder, "r50k_mine.tiktoken"),
    "vocab.json": pairs,
    "vocab.txt": words,
    "GGUF": gguf,
}


def talk(tokenizer: Tokenizer) -> dict[str, Any]:
    """Everything that a user sees of a tokenizer."""
    from argosy.data.chat.template import render

    ids = [tokenizer.encode(text, special) for text in TEXTS for special in (False, True)]
    return {
        "ids": ids,
        "text": [tokenizer.decode(row, skip_special=False) for row in ids],
        "chats": {name: render(text, MESSAGES, tokenizer.special) for name, text in tokenizer.chat_templates.items()},
        "about": (tokenizer.vocab, tokenizer.bos, tokenizer.eos, tokenizer.pad, tokenizer.adds_bos, tokenizer.special),
    }


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("format", ["hub", "argosy"])
def test_what_loaded_talks_again_after_save(name, format, tmp_path):
    """Twice over: a saved model can be saved again."""
    source = tmp_path / "source"
    source.mkdir()
    KINDS[name](source)
    companions = source / "model.gguf" if name == "GGUF" else source
    tokenizer = find_tokenizer(companions)
    assert tokenizer is not None
    expected = talk(tokenizer)
    assert expected["chats"] or name == "GGUF"
    generator = np.random.default_rng(0)
    weights = Arrays({n: generator.normal(size=shape).astype(np.float32) for n, shape in shapes().items()})
    for turn in range(2):
        folder = tmp_path / f"saved{turn}"
        write_model_folder(folder, format, CONFIG, weights, {}, companions, tokenizer=tokenizer)
        stored = open_model(folder)
        tokenizer, companions, weights = stored_tokenizer(stored), stored.companions, stored.weights
        assert tokenizer is not None
        assert talk(tokenizer) == expected


def shapes() -> dict[str, tuple[int, ...]]:
    from argosy.models.parts.stack.addresses import stored_addresses
    from argosy.models.parts.weight import variables

    model = CONFIG.build()
    model_variables = variables(model)
    return {
        n: tuple(model_variables[a].shape if i is None else model_variables[a].shape[1:])
        for n, (a, i) in stored_addresses(model).items()
    }


def test_every_file_that_a_tokenizer_is_read_from_is_copied(tmp_path):
    """By name: the folder's other files stay behind."""
    for name, make in KINDS.items():
        if name != "GGUF":
            (tmp_path / name).mkdir()
            make(tmp_path / name)
            (tmp_path / name / "notes.txt").write_text("")
            (tmp_path / name / "weights.bin").write_text("")
            there = {p.relative_to(tmp_path / name).as_posix() for p in (tmp_path / name).rglob("*") if p.is_file()}
            assert {file.name for file in companion_files(tmp_path / name)} == there - {"notes.txt", "weights.bin"}


def test_patterns_match_each_file_once(tmp_path):
    for name in ("tokenizer.json", "a.tiktoken", "b.tiktoken"):
        (tmp_path / name).write_text("")
    assert [path.name for path in matching(tmp_path, [*COMPANIONS, "*.tiktoken"])] == [
        "tokenizer.json",
        "a.tiktoken",
        "b.tiktoken",
    ]
