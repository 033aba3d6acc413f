"""Runs whose layers are split over stages: the same numbers as scanned layers, resumed with and without them, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from campaign_kill import SMALL
from helpers import numbers, relative
from test_adapter_runs import save_model

import argosy
from argosy.checkpoint.open import open_model
from argosy.core.errors import ArgosyError, BadInput
from argosy.jobs.convert import convert
from argosy.jobs.train import Quiet, train
from argosy.run.settings.compose import compose
from argosy.run.settings.run import Run

# Adam would make of a gradient's rounding a step of full size.
WORDS = [*SMALL, "model.layers=4", "data.batch=16", "mesh.data=-1", "mesh.fsdp=1", "checkpoint.every=2"]
WORDS += ["eval.batches=1", "eval.every=2", "optimizer=sgd", "optimizer.momentum=0.9", "optimizer.learning_rate=0.1"]


class Headed(Quiet):
    """Keeps the header of a run."""

    facts = None

    def header(self, facts):
        self.facts = facts


def fit(run: Path, *words: str) -> dict:
    view = Headed()
    train("tiny", [*WORDS, f"dir={run}", *words], view)
    return view.facts or {}


@pytest.mark.slow
def test_a_run_goes_on_with_other_stages(tmp_path: Path):
    """With 2 stages, without, with 4: as the run that was scanned all along."""
    fit(tmp_path / "scan", "steps=6", "execution.run=scan")
    header = fit(tmp_path / "run", "steps=2", "mesh.stage=2")
    assert header["pipeline"] == "2 stages, 4 microbatches, idle 20% of the time"
    assert "pipeline" not in fit(tmp_path / "run", "steps=4", "mesh.stage=1")
    fit(tmp_path / "run", "steps=6", "mesh.stage=4", "execution.microbatches=8")
    for name in ("loss", "grad_norm", "eval_loss"):
        expected, losses = numbers(tmp_path / "scan", name), numbers(tmp_path / "run", name)
        assert losses == pytest.approx(expected, rel=1e-5), name
        assert len(expected) == (3 if name == "eval_loss" else 6)


def near(run: Path, other: Path, *names: str, rel: float = 1e-5) -> None:
    """Whether two runs tell the same numbers, and any."""
    for name in names:
        expected = numbers(run, name)
        assert expected
        assert numbers(other, name) == pytest.approx(expected, rel=rel), name


@pytest.mark.slow
def test_a_run_in_rounds_is_the_scanned_one_wherever_it_is_read(tmp_path: Path):
    """On two stages, on none, on one of four devices; then as a Hub folder, as weights and as the state of a run of one round."""
    # Eight random layers at a larger rate magnify rounding: scanned and unrolled ones are 2e-4 apart after six steps.
    deep = ["model.layers=8", "optimizer.learning_rate=0.02"]
    words = [*deep, "execution.rounds=2"]
    fit(tmp_path / "scan", *deep, "steps=6", "execution.run=scan")
    header = fit(tmp_path / "run", *words, "steps=2", "mesh.stage=2")
    assert header["pipeline"] == "2 stages, 4 microbatches in 2 rounds, idle 11% of the time"
    assert "pipeline" not in fit(tmp_path / "run", *words, "steps=4")
    fit(tmp_path / "run", *words, "steps=6", "mesh.stage=4", "execution.microbatches=8")
    near(tmp_path / "scan", tmp_path / "run", "loss", "grad_norm", "eval_loss")
    scanned, other = (open_model(str(tmp_path / name)).weights for name in ("scan", "run"))
    assert set(scanned.names) == set(other.names) != set()
    for name in scanned.names:
        assert relative(other.read(name), scanned.read(name)) < 1e-4, name
    for name in ("scan", "run"):
        convert(str(tmp_path / name), tmp_path / f"{name}-hub", "hub", None)
    hubs = [argosy.load(str(tmp_path / f"{name}-hub")) for name in ("scan", "run")]
    hubs.append(argosy.load(str(tmp_path / "run")))
    logits = [np.asarray(lm.logits(np.arange(3, 20))) for lm in hubs]
    assert np.array_equal(logits[1], logits[2]), "the folder is the run"
    assert relative(logits[1], logits[0]) < 1e-4
    # The optimizer's momentum too: from its state, one round and two go on alike.
    more = ["steps=8", f"init.state={tmp_path / 'run'}", "mesh.stage=2"]
    fit(tmp_path / "one", *deep, *more)
    fit(tmp_path / "two", *words, *more)
    near(tmp_path / "one", tmp_path / "two", "loss", "grad_norm")


def test_a_run_keeps_its_rounds(tmp_path: Path):
    fit(tmp_path / "run", "steps=2", "execution.rounds=2", "execution.run=scan")
    for words in (["execution.run=scan"], ["execution.rounds=4"]):
        with pytest.raises(ArgosyError, match=r"execution\.rounds"):
            fit(tmp_path / "run", "steps=4", *words)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "dpo", "reward", "mtp"])
def test_what_else_is_trained_over_stages_is_trained_as_scanned(tmp_path: Path, kind: str):
    """Adapters, a preference beside its reference, a head of scores, tokens further ahead: in one round and in two."""
    small = [word for word in SMALL if not word.startswith(("data.", "eval.", "model.", "steps"))]
    sizes = ["model.width=16", "model.layers=4", "model.ffn=32", "model.heads=2", "model.vocab=258", "model.context=64"]
    family = ["model.family=llama", "model.kv_heads=1"]
    latent = ["model.head_size=8", "model.rope_size=4", "model.value_size=8", "model.latent_rank=8", "model.dense=0", "model.mtp=1"]
    latent += ["model.moe.count=4", "model.moe.active=2", "model.moe.ffn=16"]
    data = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{i} {i % 7}:", "chosen": f" {i % 10}" * (1 + i % 3), "rejected": " no" * (1 + i % 2)} for i in range(24)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = [f"data.source={data}", "data.sequence=32", "data.batch=16", "data.epochs=99", "data.held_out=0.2", "eval.batches=1"]
    text = ["data.source=synthetic", "data.sequence=16", "data.batch=16", "eval.batches=1"]
    recipe, words = {
        "lora": ("tiny", [*text, "adapter=lora", "adapter.rank=2"]),
        "dpo": ("dpo", [*family, *sizes, *pairs, "objective.reference=online"]),
        "reward": ("tiny", [*family, *sizes, *pairs, "objective=reward"]),
        "mtp": ("tiny", ["model.family=deepseek", *sizes, *text, *latent]),
    }[kind]
    if kind in ("lora", "dpo"):
        config = compose(Run, "tiny", [*small, *sizes, *family, "data.sequence=32"]).value.model
        folder = save_model(config, tmp_path / "base")
        words = [word for word in words if not word.startswith("model.")] + [f"model={folder}"]
    common = [*small, *words, "steps=4", "eval.every=2", "optimizer=sgd", "optimizer.momentum=0.9", "optimizer.learning_rate=0.1"]
    common += ["execution.run=scan", f"data.cache={tmp_path / 'cache'}", "mesh.fsdp=1"]
    for name, more in {
        "scan": ["mesh.data=-1"],
        "staged": ["mesh.data=-1", "mesh.stage=2"],
        "rounds": ["mesh.data=-1", "mesh.stage=2", "execution.rounds=2"],
    }.items():
        train(recipe, [*common, *more, f"dir={tmp_path / name}"], Quiet())
    for name in ("staged", "rounds"):
        near(tmp_path / "scan", tmp_path / name, "loss", "grad_norm", "eval_loss", rel=1e-4)
    assert len(set(numbers(tmp_path / "scan", "loss").values())) == 4, "nothing was trained"


@pytest.mark.parametrize(
    ("words", "kind", "problem"),
    [
        (["execution.rounds=2", "execution.run=unroll"], BadInput, "execution.rounds = 2 is of stacked layers"),
        (["execution.rounds=3"], BadInput, "mesh.stage = 1 and execution.rounds = 3: 4 layers repeat 4 times, in groups"),
        (["mesh.stage=4", "execution.rounds=2"], BadInput, "mesh.stage = 4 and execution.rounds = 2: 4 layers repeat 4 times"),
        (["mesh.stage=4", "model.layers=3"], BadInput, "mesh.stage = 4: 3 layers repeat 3 times, in groups"),
        (["mesh.stage=2", "model.layers=1"], BadInput, "mesh.stage = 2: 1 layers repeat 1 times"),
        (["mesh.stage=2", "data.batch=12"], BadInput, "data.batch = 12 does not divide into 2 microbatches over 4 devices"),
        (["mesh.stage=2", "execution.microbatches=3"], BadInput, "microbatches = 3 is no multiple of mesh.stage = 2"),
        (["mesh.stage=2", "execution.microbatches=8"], BadInput, "does not divide into 8 microbatches over 4 devices"),
        (["mesh.stage=2", "execution.run=unroll"], BadInput, "mesh.stage = 2 splits stacked layers"),
        (["execution.microbatches=4"], BadInput, "execution.microbatches is of a pipeline, and mesh.stage is 1"),
        (["mesh.stage=2", "sample.every=2"], BadInput, "mesh.stage and sample.every do not combine"),
    ],
)
def test_what_stages_cannot_do_is_said_before_a_run_begins(tmp_path: Path, words, kind, problem):
    with pytest.raises(ArgosyError) as caught:
        fit(tmp_path / "run", "steps=2", *words)
    assert isinstance(caught.value, kind)
    assert problem in str(caught.value)
    assert caught.value.hint
    assert not (tmp_path / "run").exists()
