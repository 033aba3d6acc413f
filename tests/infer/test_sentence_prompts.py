"""Prompts before texts that become vectors: the same text after its prompt by hand, in Python, in a bundle and over HTTP;
and vectors that leave the prompt out."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relative, shared
from serve.conftest import inside

import argosy
from argosy.core.errors import BadInput
from argosy.data.tokenizers.load import find_tokenizer
from argosy.export.bundle import Bundle
from argosy.export.steps import TokenizeStep, tokenize_inputs
from argosy.infer.lm import LM
from argosy.models import FAMILIES
from argosy.serve import run
from argosy.serve.app import App
from argosy.serve.settings import ServeSettings
from argosy.weights.build import random_model
from argosy.weights.hub.sentence_steps import EmbeddingSteps, read_steps, write_steps

PROMPTS = {"query": "query: ", "passage": "passage: ", "plain": ""}
TEXTS = ["how do bees find flowers", "Bees"]


def encoder(folder: Path, **options: Any) -> argosy.LM:
    """A small encoder with the words of BERT, read from a folder with prompts."""
    config = FAMILIES["bert"].examples()["plain"].model_copy(update={"vocab": 30522, "layers": 1})
    LM(config, random_model(config, 0).module, find_tokenizer(str(shared("tokenizers/bert_uncased_vocab.txt")))).save(folder)
    write_steps(folder, EmbeddingSteps("mean", normalize=True, tokens=24, prompts=PROMPTS, **options), config.width)
    return argosy.load(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> argosy.LM:
    return encoder(tmp_path_factory.mktemp("encoder") / "whole", default_prompt="passage")


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> argosy.LM:
    return encoder(tmp_path_factory.mktemp("encoder") / "without", include_prompt=False)


def test_a_prompt_is_text_before_the_text(whole: argosy.LM):
    def plain(before: str) -> np.ndarray:
        return whole.embed([before + text for text in TEXTS], prompt="")

    assert relative(whole.embed(TEXTS, prompt_name="query"), plain("query: ")) < 1e-6
    assert relative(whole.embed(TEXTS), plain("passage: ")) < 1e-6
    assert relative(whole.embed(TEXTS, prompt="passage: "), plain("passage: ")) < 1e-6
    assert relative(whole.embed(TEXTS, prompt_name="plain"), plain("")) < 1e-6
    assert relative(plain("query: "), plain("")) > 1e-2
    for wrong, why in (({"prompt_name": "querry"}, "no prompt `querry`"), ({"prompt": "", "prompt_name": "query"}, "one of them")):
        with pytest.raises(BadInput, match=why):
            whole.embed(TEXTS, **wrong)


def by_hand(lm: argosy.LM, prompt: str, text: str) -> np.ndarray:
    """The mean of a text's vectors, without those of [CLS] and of its prompt."""
    before, ids = lm.tokenizer.encode(prompt), lm.tokenizer.encode(prompt + text)
    row = jnp.asarray([[101, *ids, 102]], jnp.int32)
    hidden = np.asarray(lm.module.hidden(row, lm.config.attend(jnp.ones_like(row)))[0][0])
    mean = hidden[1 + len(before) if prompt else 0 :].mean(0)
    return mean / np.linalg.norm(mean)


def test_a_prompt_that_is_not_pooled_is_still_read(without: argosy.LM):
    """As in sentence-transformers, [CLS] is left out with the prompt before it; texts of both lengths share a batch."""
    assert not read_steps(without.companions).include_prompt
    for name in ("query", "plain", None):
        expected = np.stack([by_hand(without, PROMPTS.get(name or "", ""), text) for text in TEXTS])
        assert relative(without.embed(TEXTS, prompt_name=name), expected) < 1e-5
    same = without.embed(["query: " + text for text in TEXTS], prompt="")
    assert relative(without.embed(TEXTS, prompt_name="query"), same) > 1e-2


@pytest.mark.parametrize("kind", ["whole", "without"])
def test_bundles_take_the_name_of_a_prompt(kind: str, tmp_path: Path, request: pytest.FixtureRequest):
    lm = request.getfixturevalue(kind)
    lm.export(tmp_path / "bundle", platforms=["cpu"])
    bundle = Bundle.open(tmp_path / "bundle")
    assert relative(bundle.run({"text": TEXTS})["embedding"], lm.embed(TEXTS)) < 1e-5
    assert relative(bundle.run({"text": TEXTS, "prompt_name": "query"})["embedding"], lm.embed(TEXTS, prompt_name="query")) < 1e-5
    mixed = bundle.run({"text": TEXTS, "prompt_name": ["query", "plain"]})["embedding"]
    assert relative(mixed[:1], lm.embed(TEXTS[:1], prompt_name="query")) < 1e-5
    assert relative(mixed[1:], lm.embed(TEXTS[1:], prompt_name="plain")) < 1e-5
    with pytest.raises(BadInput, match="no prompt `querry`"):
        bundle.run({"text": TEXTS, "prompt_name": "querry"})
    with pytest.raises(BadInput, match="has 3 texts, and there are 2"):
        bundle.run({"text": TEXTS, "prompt_name": ["query"] * 3})


def test_the_server_takes_the_name_of_a_prompt_and_ranks_by_roles(without: argosy.LM):
    service = run.build_encoder(without, "small", ServeSettings(warm_up=False), None)

    def ask(path: str, **body: Any) -> Any:
        return inside(App(service).asgi, lambda client: client.post(path, json=body))

    try:
        vectors = [entry["embedding"] for entry in ask("/v1/embeddings", input=TEXTS, prompt_name="query").json()["data"]]
        assert relative(np.asarray(vectors), without.embed(TEXTS, prompt_name="query")) < 1e-5
        assert "no prompt `querry`" in ask("/v1/embeddings", input=TEXTS, prompt_name="querry").json()["error"]["message"]
        ranked = {entry["index"]: entry["relevance_score"] for entry in ask("/rerank", query="bees", documents=TEXTS).json()["results"]}
    finally:
        service.front.close()
    cosines = without.embed(TEXTS, prompt_name="passage") @ without.embed(["bees"], prompt_name="query")[0]
    assert [ranked[0], ranked[1]] == pytest.approx(cosines.tolist(), rel=1e-4)


def test_a_folder_without_prompts_is_written_without_their_file(tmp_path: Path):
    write_steps(tmp_path, EmbeddingSteps("mean"), 8)
    assert not (tmp_path / "config_sentence_transformers.json").exists()
    assert json.loads((tmp_path / "1_Pooling" / "config.json").read_text())["include_prompt"] is True


def test_a_token_of_the_prompt_and_of_the_text_is_pooled():
    """In byte-level BPE a prompt's last blank belongs to the first word of the text."""
    tokenizer = find_tokenizer(str(shared("tokenizers/cl100k_base.tiktoken")))
    step = TokenizeStep(prompt="query: ", prompt_length="after")
    inputs = tokenize_inputs(step, tokenizer, ["bees", "war and peace"], None)
    for row, after, text in zip(inputs["tokens"], inputs["after"], ("bees", "war and peace"), strict=True):
        assert 0 < after < len(row)
        assert tokenizer.decode([int(i) for i in row[after:] if i]).strip() == text


def test_a_prompt_is_refused_where_nothing_follows_it(without):
    with pytest.raises(BadInput, match="token ids"):
        without.embed([[101, 102]], prompt_name="query")
    with pytest.raises(BadInput, match="nothing is left"):
        without.embed(["bees"], prompt="query " * 40)
