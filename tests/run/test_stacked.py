"""New adapters on a base that has adapters already: merged into it, or kept as they are under the new ones."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from campaign_kill import SMALL
from helpers import LOGIT_ROUNDING, relative, shared
from test_retrained import save_model

import argosy
from argosy.checkpoint.open import open_model
from argosy.core.errors import ArgosyError, BadInput
from argosy.core.storage import Store
from argosy.jobs.convert import convert
from argosy.jobs.quickstart.proof import digest
from argosy.observe.metrics import by_step, read
from argosy.run.settings.compose import compose
from argosy.run.settings.run import Run
from argosy.weights.peft.reader import read_contents

WORDS = [word for word in SMALL if not word.startswith(("model.", "optimizer"))]
WORDS += ["checkpoint.every=2", "optimizer=adamw", "optimizer.learning_rate=1e-2", "schedule=constant"]
LORA = ["adapter=lora", "adapter.rank=2"]
TOKENS = np.arange(3, 20)


def fit(base: Path, run: Path, *words: str) -> dict[int, float]:
    argosy.fit("tiny", *WORDS, f"model={base}", f"dir={run}", *words)
    return by_step(read(Store(run)), "loss")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = compose(Run, "tiny", [*SMALL, "model.layers=2", "model.tied=false"]).value.model
    return save_model(config, tmp_path_factory.mktemp("stacked") / "base")


@pytest.fixture(scope="module")
def first(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of adapters on the attention of both layers and on one matrix of the second, and of the final norm."""
    run = tmp_path_factory.mktemp("first") / "run"
    where = r"adapter.where=layers\..*\.attn\..*|layers\.1\.mlp\.up"
    fit(base, run, "steps=2", "adapter=lora", "adapter.rank=3", "adapter.train=norm", where, "execution.run=unroll")
    return run


@pytest.fixture(scope="module")
def runs(first: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[int, float]]]:
    """Four steps of further adapters, on the feed-forward layers and the queries."""
    stacked = {}
    for onto in ("merge", "stack"):
        run = tmp_path_factory.mktemp("second") / onto
        stacked[onto] = run, fit(first, run, "steps=4", *second(onto))
    return stacked


def second(onto: str) -> list[str]:
    return [*LORA, r"adapter.where=layers\..*\.mlp\..*|layers\..*\.attn\.q", f"adapter.onto={onto}"]


@pytest.mark.slow
def test_the_choice_is_the_users(base: Path, first: Path, tmp_path: Path):
    with pytest.raises(BadInput, match="has adapters already") as error:
        fit(first, tmp_path / "run", "steps=1", *LORA)
    assert "adapter.onto=merge" in str(error.value)
    assert "adapter.onto=stack" in str(error.value)
    with pytest.raises(BadInput, match="has no adapters"):
        fit(base, tmp_path / "run", "steps=1", *LORA, "adapter.onto=stack")
    both = ["adapter.onto=stack", r"adapter.train=layers\.1\.attn\.q"]
    with pytest.raises(BadInput, match=r"matches layers\.1\.attn\.q, which has an adapter of the base"):
        fit(first, tmp_path / "run", "steps=1", *LORA, *both, "execution.run=unroll")
    with pytest.raises(ArgosyError, match="DoRA is not stacked"):
        fit(first, tmp_path / "run", "steps=1", "adapter=dora", "adapter.rank=2", "adapter.onto=stack")


@pytest.mark.slow
def test_both_begin_where_the_first_ones_ended_and_learn_the_same(first: Path, runs: Any, tmp_path: Path):
    """As functions they are one model: so are the losses of all four steps."""
    whole = fit(first, tmp_path / "run", "steps=1", "adapter=none")
    for _, losses in runs.values():
        assert losses[1] == pytest.approx(whole[1], rel=1e-6)
    merge, stack = (runs[onto][1] for onto in ("merge", "stack"))
    assert relative(list(stack.values()), list(merge.values())) < 1e-5


def test_what_was_trained_is_the_same_model_everywhere(base: Path, first: Path, runs: Any, tmp_path: Path):
    before = argosy.load(first).logits(TOKENS)
    for onto, (run, _) in runs.items():
        expected = argosy.load(run).logits(TOKENS)
        assert relative(expected, before) > 1e-2
        convert(str(run), tmp_path / onto, "hub", None)
        assert relative(argosy.load(tmp_path / onto).logits(TOKENS), expected) < LOGIT_ROUNDING
    stack = argosy.load(runs["stack"][0]).logits(TOKENS)
    assert relative(stack, argosy.load(runs["merge"][0]).logits(TOKENS)) < 1e-4
    # One PEFT folder on the plain base.
    folder = runs["stack"][0] / "adapter"
    assert relative(argosy.load(base, adapter=folder).logits(TOKENS), stack) < LOGIT_ROUNDING
    assert relative(argosy.load(folder).logits(TOKENS), stack) < LOGIT_ROUNDING


def test_stacked_ones_keep_those_below(base: Path, first: Path, runs: Any):
    under, both = (open_model(run).adapted.contents for run in (first, runs["stack"][0]))
    assert set(both.adapters) == set(under.adapters) | {f"layers.{i}.mlp.{kind}" for i in range(2) for kind in ("gate", "up", "down")}
    ranks = {name: adapter.a.shape[-1] for name, adapter in both.adapters.items()}
    assert (ranks["layers.0.attn.q"], ranks["layers.0.attn.k"], ranks["layers.1.mlp.up"], ranks["layers.0.mlp.up"]) == (5, 3, 5, 2)
    for name, adapter in under.adapters.items():
        product = np.tensordot(both.adapters[name].a[..., :3], both.adapters[name].b[:3], 1) * both.adapters[name].gain
        np.testing.assert_allclose(product, adapter.gain * np.tensordot(adapter.a, adapter.b, 1), rtol=1e-4, atol=1e-6)
    assert set(both.whole) == {"norm.scale"}
    np.testing.assert_array_equal(both.whole["norm.scale"], under.whole["norm.scale"])
    contents = read_contents(runs["stack"][0] / "adapter", open_model(base).config)
    assert set(contents.adapters) == set(both.adapters)


@pytest.mark.slow
def test_a_resume_is_bit_for_bit(first: Path, runs: Any, tmp_path: Path):
    run, losses = runs["stack"]
    half = tmp_path / "run"
    Path(shutil.copytree(run, half))
    shutil.rmtree(half / "checkpoints" / "4")
    assert fit(first, half, "steps=4", *second("stack")) == losses
    assert digest(half, 4) == digest(run, 4)


@pytest.mark.slow
def test_scanned_layers_and_a_peft_folder_as_the_base(base: Path, first: Path, runs: Any, tmp_path: Path):
    """In a scan, layers without an adapter have one of zeros."""
    losses = fit(first / "adapter", tmp_path / "run", "steps=4", *second("stack"), "execution.run=scan")
    assert relative(list(losses.values()), list(runs["stack"][1].values())) < 1e-5
    stack = argosy.load(runs["stack"][0]).logits(TOKENS)
    assert relative(argosy.load(tmp_path / "run").logits(TOKENS), stack) < 1e-4
    away = shutil.copytree(first / "adapter", tmp_path / "away")
    config = away / "adapter_config.json"
    config.write_text(config.read_text().replace(str(base.resolve()), "meta-llama/Llama"))
    with pytest.raises(BadInput, match="meta-llama/Llama, is not on this machine"):
        argosy.load(away)


def test_a_folder_of_adapters_brings_the_tokenizer_of_its_base(base: Path, first: Path, tmp_path: Path):
    """Such folders mostly have none of their own, and a run would read its data as bytes."""
    whole, adapters = tmp_path / "base", tmp_path / "adapters"
    shutil.copytree(base, whole)
    for file in shared("models/stories260k").glob("tokenizer*"):
        shutil.copy(file, whole)
    shutil.copytree(first / "adapter", adapters)
    config_file = adapters / "adapter_config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"base_model_name_or_path": str(whole)}))
    assert compose(Run, "tiny", [f"model={adapters}"]).value.data.tokenizer == str(whole)
    shutil.copy(whole / "tokenizer.model", adapters)
    assert compose(Run, "tiny", [f"model={adapters}"]).value.data.tokenizer == str(adapters)
