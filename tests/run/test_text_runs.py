"""Runs that train sentence encoders and cross-encoders: they learn, say how their vectors are made, and refuse what would mean another
loss."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers import Heard, shared

import argosy
from argosy.checkpoint.open import open_model
from argosy.core.errors import UserError
from argosy.core.storage import Store
from argosy.data.tokenizers.load import find_tokenizer
from argosy.infer.lm import LM
from argosy.jobs.quickstart.proof import digest
from argosy.models import FAMILIES
from argosy.observe.metrics import read
from argosy.weights.build import random_model
from argosy.weights.hub.sentence_steps import EmbeddingSteps, read_steps, write_steps

WORDS = {"one": "eins", "two": "zwei", "three": "drei", "four": "vier", "five": "acht", "six": "tier"}
THINGS = {"horse": "stein", "house": "berg", "tree": "baum", "river": "wald", "bread": "land"}
SMALL = ["data.sequence=8", "data.batch=48", "data.held_out=0.2", "data.epochs=99", "checkpoint.every=10"]
SMALL += ["optimizer.learning_rate=3e-3", "schedule=constant", "eval.every=20", "eval.batches=1", "log.every=10"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder of random weights, read at its first token."""
    folder = tmp_path_factory.mktemp("model") / "encoder"
    config = FAMILIES["bert"].examples()["plain"].model_copy(update={"vocab": 30522, "layers": 1, "width": 32, "mlp": 64})
    LM(config, random_model(config, 0).module, find_tokenizer(str(shared("tokenizers/bert_uncased_vocab.txt")))).save(folder)
    write_steps(folder, EmbeddingSteps("cls", normalize=True, tokens=32), config.width)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Phrases of two words and their translations, which share no word with them."""
    folder, paths = tmp_path_factory.mktemp("data"), {}
    phrases = [(f"{a} {b}", f"{WORDS[a]} {THINGS[b]}") for a in WORDS for b in THINGS] * 4
    others = [phrases[(i + 7) % 30][1] for i in range(len(phrases))]
    rows = {
        "pairs": [{"anchor": a, "positive": p} for a, p in phrases],
        "triplets": [{"anchor": a, "positive": p, "negative": n} for (a, p), n in zip(phrases, others)],
        "negatives": [{"anchor": a, "positive": p, "negatives": others[i : i + i % 4]} for i, (a, p) in enumerate(phrases)],
        "scores": [{"sentence1": a, "sentence2": x, "score": s} for (a, p), n in zip(phrases, others) for x, s in ((p, 5), (n, 0.5))],
    }
    for name, each in rows.items():
        paths[name] = folder / f"{name}.jsonl"
        paths[name].write_text("".join(json.dumps(row) + "\n" for row in each))
    return paths


def fit(recipe: str, model: Path, source: Path, run: Path, *more: str, steps: int = 20) -> str:
    heard = Heard()
    words = [f"model={model}", f"data.source={source}", f"dir={run}", f"data.cache={run.parent / 'cache'}", *SMALL]
    argosy.fit(recipe, *words, *more, view=heard, steps=steps)
    return heard.words


def last_evaluation(run: Path) -> dict[str, float]:
    return [line for line in read(Store(run)) if "eval_loss" in line][-1]


def test_an_encoder_learns_pairs_and_its_folder_says_how(model: Path, data: dict[str, Path], tmp_path: Path):
    run = tmp_path / "run"
    fit("embed", model, data["pairs"], run, "objective.dimensions=[8,32]")
    # Of more than ten documents one is right.
    assert last_evaluation(run)["eval_negatives"] > 10
    assert last_evaluation(run)["eval_recall@1"] > 0.5
    steps = read_steps(open_model(run).companions)
    assert steps == EmbeddingSteps("cls", normalize=True, tokens=8)
    lm = argosy.load(run)
    assert lm.hub["matryoshka_dimensions"] == [8, 32]
    phrases, translations = lm.embed(["two trees", "two house", "six bread"]), lm.embed(["zwei berg", "tier land"])
    assert np.linalg.norm(phrases, axis=1) == pytest.approx(1, abs=1e-5)
    assert (phrases[1:] @ translations.T).argmax(1).tolist() == [0, 1]
    lm.save(tmp_path / "hub")
    assert read_steps(tmp_path / "hub") == steps


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "kind", "more"), [("embed", "pairs", ()), ("rerank", "triplets", ("data.sequence=16",))])
def test_a_resume_is_bit_for_bit(recipe: str, kind: str, more: tuple[str, ...], model: Path, data: dict[str, Path], tmp_path: Path):
    fit(recipe, model, data[kind], tmp_path / "whole", *more)
    fit(recipe, model, data[kind], tmp_path / "parts", *more, steps=10)
    fit(recipe, model, data[kind], tmp_path / "parts", *more)
    assert digest(tmp_path / "whole", 20) == digest(tmp_path / "parts", 20)


@pytest.mark.slow
def test_graded_pairs_and_negatives_are_learned(model: Path, data: dict[str, Path], tmp_path: Path):
    fit("embed", model, data["scores"], tmp_path / "scores", "objective=similarity", steps=60)
    assert last_evaluation(tmp_path / "scores")["eval_ordered"] > 0.9
    fit("embed", model, data["triplets"], tmp_path / "triplets", "objective.negatives=1")
    assert last_evaluation(tmp_path / "triplets")["eval_negatives"] > 7
    assert last_evaluation(tmp_path / "triplets")["eval_recall@1"] > 0.5
    fit("embed", model, data["negatives"], tmp_path / "negatives", "objective.negatives=2", "data.batch=64")
    assert last_evaluation(tmp_path / "negatives")["eval_negatives"] > 10
    assert last_evaluation(tmp_path / "negatives")["eval_recall@1"] > 0.5


@pytest.mark.slow
def test_a_cross_encoder_ranks(model: Path, data: dict[str, Path], tmp_path: Path):
    fit("rerank", model, data["triplets"], tmp_path / "run", "data.sequence=16", steps=60)
    assert last_evaluation(tmp_path / "run")["eval_accuracy"] > 0.8
    lm = argosy.load(tmp_path / "run")
    right, wrong = lm.classify([("one horse", "eins stein"), ("one horse", "zwei berg")])
    assert next(iter(right.values())) > next(iter(wrong.values()))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["mesh.data=8 mesh.fsdp=1", "mesh.fsdp=4 mesh.tensor=2"])
def test_negatives_come_from_all_devices(mesh: str, model: Path, data: dict[str, Path], tmp_path: Path):
    fit("embed", model, data["pairs"], tmp_path / "one", steps=5)
    fit("embed", model, data["pairs"], tmp_path / "many", *mesh.split(), steps=5)
    single, many = (last_evaluation(tmp_path / name)["eval_loss"] for name in ("one", "many"))
    assert many == pytest.approx(single, rel=1e-4)
    assert last_evaluation(tmp_path / "many")["eval_negatives"] > 7


@pytest.mark.parametrize(
    ("recipe", "kind", "words", "why"),
    [
        ("embed", "pairs", ["accumulate=2"], "an example is compared with the others of its part of the batch alone"),
        ("embed", "triplets", [], "`pair` records, and this data is `triplet`"),
        ("embed", "pairs", ["objective.negatives=1"], "`triplet` or `negatives` records, and this data is `pair`"),
        ("embed", "pairs", ["objective.negatives=2", "data.batch=64"], "trains on `negatives` records, and this data is `pair`"),
        ("embed", "negatives", [], "and this data is `negatives`\\s+.*\\s+hint: objective.negatives=N trains on records with N"),
        ("embed", "negatives", ["objective.negatives=2", "data.batch=64", "data.negatives=3"], "this data has groups of 5 rows"),
        ("embed", "pairs", ["objective.dimensions=[64]"], "the model's vectors have 32 numbers"),
        ("embed", "pairs", ["data.batch=2", "mesh.fsdp=1", "mesh.context=8"], "holds 1 example, and objective=contrastive compares"),
        ("rerank", "pairs", [], "a record without `negative`"),
    ],
)
def test_what_would_be_another_loss_is_refused(recipe, kind, words, why, model: Path, data: dict[str, Path], tmp_path: Path):
    with pytest.raises(UserError, match=why):
        fit(recipe, model, data[kind], tmp_path / "run", *words)


def test_prompts_of_the_model_or_of_the_settings_are_before_texts_and_kept(model: Path, data: dict[str, Path], tmp_path: Path):
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    steps = EmbeddingSteps("mean", True, 32, prompts={"query": "query: "}, default_prompt="query", include_prompt=False)
    write_steps(copy, steps, 32)
    output = fit("embed", copy, data["pairs"], tmp_path / "run", "eval.batches=0", steps=1)
    assert "[CLS]⟧query : one horse" in output.replace("⟦", "")
    text_steps = read_steps(open_model(tmp_path / "run").companions)
    assert (text_steps.prompts, text_steps.default_prompt, text_steps.include_prompt) == ({"query": "query: "}, "query", False)
    words = ["data.prompts.anchor=q: ", "data.prompts.positive=d: ", "data.prompts.negative=d: ", "objective.negatives=1"]
    output = fit("embed", copy, data["triplets"], tmp_path / "own", *words, "eval.batches=0", "data.batch=48", steps=1)
    text_steps = read_steps(open_model(tmp_path / "own").companions)
    assert (text_steps.prompts, text_steps.default_prompt) == ({"query": "q: ", "document": "d: "}, None)
    with pytest.raises(UserError, match=r"leaves prompts out of vectors, and data\.prompts names none"):
        fit("embed", model, data["pairs"], tmp_path / "none", "objective.include_prompt=false")
    with pytest.raises(UserError, match=r"data\.prompts\.sentence1, and `pair` records have no such text"):
        fit("embed", model, data["pairs"], tmp_path / "none", "data.prompts.sentence1=q")


def test_pairs_are_no_single_texts(data: dict[str, Path], tmp_path: Path):
    decoder = shared("models/stories260k")
    with pytest.raises(UserError, match=r"trains on single texts, and this data is `pair`\s+.*\s+hint: objective=contrastive"):
        fit("sft", decoder, data["pairs"], tmp_path / "run")
