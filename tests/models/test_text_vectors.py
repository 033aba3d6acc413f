"""Language models as sentence encoders, against transformers' hidden states: folders without a head, read at the last token or as a
mean, whatever side rows are padded on; in Python, in a bundle, over HTTP, and trained."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from golden_weights import digest, draw_weights
from helpers import Heard, relative
from safetensors.numpy import save_file
from serve.conftest import inside
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import argosy
from argosy.core.errors import BadInput
from argosy.core.storage import Store
from argosy.export.bundle import Bundle
from argosy.models.parts.texts import text_vectors
from argosy.observe.metrics import read
from argosy.serve import run
from argosy.serve.app import App
from argosy.serve.engine.encoder import EncoderService
from argosy.serve.settings import ServeSettings
from argosy.weights.hub.sentence_steps import EmbeddingSteps, read_steps, write_steps

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "vectors.json").read_text(encoding="utf-8"))
# As for other reference models: three times what was measured.
TOLERANCE = 4.4e-5
PROMPT = "w5 w6 "
TEXTS = ["w10 w11 w12", "w20", "w30 w31 w32 w33 w34"]


def write_tokenizer(folder: Path) -> Tokenizer:
    """Words w0 ... w109, and an end token that the file's own post-processor puts after every text, as Qwen3-Embedding's does."""
    words = {"<unk>": 0, "<pad>": 1, "<end>": 2} | {f"w{i}": 3 + i for i in range(110)}
    library = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["<pad>", "<end>"])
    library.post_processor = processors.TemplateProcessing("$A <end>", "$A $B <end>", [("<end>", 2)])
    library.save(str(folder / "tokenizer.json"))
    config = {"pad_token": "<pad>", "padding_side": "left", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return library


def write_folder(name: str, folder: Path, pooling: str = "last") -> dict[str, Any]:
    golden = GOLDENS["models"][name]
    weights = draw_weights(golden["tensors"], GOLDENS["seed"])
    assert digest(weights) == golden["sha256"]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(golden["config"]))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    steps = EmbeddingSteps(pooling, normalize=True, tokens=20, prompts={"query": PROMPT, "document": ""})
    write_steps(folder, steps, 44)
    return golden


@pytest.mark.parametrize("name", list(GOLDENS["models"]))
def test_vectors_equal_those_of_transformers(name: str, tmp_path: Path):
    golden = write_folder(name, tmp_path / "folder")
    lm = argosy.load(tmp_path / "folder")
    assert lm.config.tied
    for pooling in ("last", "mean"):
        for side in ("left", "right"):
            expected = np.asarray(golden["vectors"][side][pooling])
            assert relative(lm.embed(golden["texts"], normalize=False, pooling=pooling), expected) < TOLERANCE
    longest = max(map(len, golden["texts"]))
    for side in ("left", "right"):
        rows = [[0] * (longest - len(ids)) for ids in golden["texts"]]
        tokens = [fill + ids if side == "left" else ids + fill for fill, ids in zip(rows, golden["texts"])]
        mask = np.asarray(tokens) > 0
        vectors = text_vectors(lm.module, jnp.asarray(tokens, jnp.int32), jnp.asarray(mask, jnp.int32), "last")[0][:, 0]
        assert relative(np.asarray(vectors), np.asarray(golden["vectors"][side]["last"])) < TOLERANCE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen 3 as Qwen3-Embedding is published: without a head, with a tokenizer that ends texts, and with prompts."""
    path = tmp_path_factory.mktemp("qwen3") / "folder"
    write_folder("qwen3", path)
    write_tokenizer(path)
    return path


def test_texts_end_as_the_tokenizer_ends_them(folder: Path):
    lm, library = argosy.load(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [library.encode(text).ids for text in TEXTS]
    assert all(row[-1] == 2 for row in ids)
    assert relative(lm.embed(TEXTS), lm.embed(ids)) < 1e-6
    token_rows = [library.encode(PROMPT + text).ids for text in TEXTS]
    assert relative(lm.embed(TEXTS, prompt_name="query"), lm.embed(token_rows)) < 1e-6
    # A text that is too long keeps its end token, as transformers cuts it.
    library.enable_truncation(20)
    long = " ".join(TEXTS * 9)
    assert relative(lm.embed([long]), lm.embed([library.encode(long).ids])) < 1e-6
    lm.save(folder.parent / "again")
    again = argosy.load(folder.parent / "again")
    assert relative(again.embed(TEXTS), lm.embed(TEXTS)) < 1e-6


def test_blanks_around_texts_are_left_out(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """sentence-transformers tokenizes `str(text).strip()`, the prompt included, whatever the model."""
    lm = argosy.load(folder)
    lm.export(tmp_path / "bundle", platforms=["cpu"])
    bundle, seen = Bundle.open(tmp_path / "bundle"), list[str]()
    kind = type(lm.tokenizer)
    original = kind.encode_many

    def encode_many(self: Any, texts: Any, *args: Any) -> Any:
        seen.extend(texts)
        return original(self, texts, *args)

    monkeypatch.setattr(kind, "encode_many", encode_many)
    for name, prompt in ((None, ""), ("query", PROMPT)):
        padded, want = f"  {TEXTS[0]}\n ", f"{prompt}  {TEXTS[0]}".strip()
        lm.embed([padded], prompt_name=name)
        assert seen[-1] == want
        seen.clear()
        bundle.run({"text": [padded], "prompt_name": name or ""})
        assert seen[-1] == want


def test_a_bundle_embeds_and_pads_on_either_side(folder: Path, tmp_path: Path):
    lm = argosy.load(folder)
    lm.export(tmp_path / "bundle", platforms=["cpu"])
    bundle = Bundle.open(tmp_path / "bundle")
    assert bundle.manifest.default == "embed"
    for name in (None, "query"):
        inputs = {} if name is None else {"prompt_name": name}
        assert relative(bundle.run({"text": TEXTS} | inputs)["embedding"], lm.embed(TEXTS, prompt_name=name)) < 1e-5
    padded_left = bundle.run({"tokens": [[0, 0, 7, 2], [5, 6, 7, 2]], "mask": [[0, 0, 1, 1], [1, 1, 1, 1]]})["embedding"]
    assert relative(padded_left, lm.embed([[7, 2], [5, 6, 7, 2]])) < 1e-5


def test_it_is_served_as_an_encoder(folder: Path):
    lm = argosy.load(folder)
    service = run.running_server(lm, "small", ServeSettings(warm_up=False), None)
    assert isinstance(service, EncoderService)
    try:
        body = {"input": TEXTS, "prompt_name": "query"}
        document = inside(App(service).asgi, lambda client: client.post("/v1/embeddings", json=body)).json()
    finally:
        service.front.close()
    assert relative(np.asarray([entry["embedding"] for entry in document["data"]]), lm.embed(TEXTS, prompt_name="query")) < 1e-5
    assert document["usage"]["prompt_tokens"] == sum(len(text.split()) + 3 for text in TEXTS)


def test_a_language_model_without_these_files_is_asked_how(folder: Path, tmp_path: Path):
    golden = write_folder("llama", tmp_path / "plain")
    (tmp_path / "plain" / "modules.json").unlink()
    lm = argosy.load(tmp_path / "plain")
    with pytest.raises(BadInput, match="not an encoder"):
        lm.embed(golden["texts"])
    with pytest.raises(BadInput, match="not an encoder"):
        lm.export(tmp_path / "bundle", signature="embed")
    expected = np.asarray(golden["vectors"]["left"]["last"])
    assert relative(lm.embed(golden["texts"], pooling="last"), expected) < TOLERANCE


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("data.prompts.anchor=w5 w6 ", "objective.negatives=2"), marks=pytest.mark.slow),
        ("adapter=lora", "adapter.rank=4"),
    ],
)
def test_it_learns(words: tuple[str, ...], folder: Path, tmp_path: Path):
    """Pairs of words that share none; with negatives and a prompt, and by an adapter."""
    rows = [{"anchor": f"w{i} w{j}", "positive": f"w{i + 50} w{j + 50}", "negatives": [f"w{j + 50} w{i}"]}
            for i in range(12) for j in range(12)]  # fmt: skip
    rows = rows if "objective.negatives=2" in words else [{"anchor": row["anchor"], "positive": row["positive"]} for row in rows]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [
        f"model={folder}",
        f"data.source={tmp_path / 'rows.jsonl'}",
        f"dir={tmp_path / 'run'}",
        f"data.cache={tmp_path / 'cache'}",
    ]
    settings += ["data.sequence=8", "data.batch=64", "data.held_out=0.2", "data.epochs=99", "mesh.data=1", "eval.every=100"]
    settings += ["eval.batches=1", "optimizer.learning_rate=1e-2", "schedule=constant"]
    argosy.fit("embed", *settings, *words, view=Heard(), steps=30)
    last = [line for line in read(Store(tmp_path / "run")) if "eval_loss" in line][-1]
    assert last["eval_recall@1"] > 0.4
    steps = read_steps(argosy.load(tmp_path / "run").companions)
    assert (steps.pooling, steps.normalize, dict(steps.prompts)["query"]) == ("last", True, PROMPT)
    assert argosy.load(tmp_path / "run").embed(["w1 w2"]).shape == (1, 44)
