"""What `argosy autotune` keeps, and which new runs take it, and keep it."""

import json
from pathlib import Path

import jax
import pytest

from argosy.checkpoint.checkpoints import Checkpoints
from argosy.cli import main
from argosy.core.errors import BadInput, Unsupported
from argosy.jobs import autotune as job
from argosy.jobs.train import Quiet, train
from argosy.ops.attention import ATTENTION, attention_reference
from argosy.ops.op import Implementation
from argosy.parallel.target import Target
from argosy.run.assembly.assemble import assemble
from argosy.run.assembly.assembly import Assembly
from argosy.run.assembly.decided import Decided
from argosy.run.assembly.winners import (
    stored_winners,
    tuned_device,
    winners_file,
    winners_of,
    with_winners,
    write_winners,
)
from argosy.run.settings.compose import compose
from argosy.run.settings.run import Run
from tests.helpers import later

WORDS = ["data.source=synthetic", "model.layers=1", "model.width=32", "model.ffn=32", "data.sequence=32", "data.batch=2"]
WORDS += ["eval.batches=0", "log.every=1"]
HERE = Target.here


def devices(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that begin from now on have so many devices."""
    monkeypatch.setattr(Target, "here", classmethod(lambda _, some=None: HERE(some or jax.devices()[:count])))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One device, and a cache of this test alone, which has no winners yet."""
    devices(1, monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("ARGOSY_TUNED", raising=False)
    return tmp_path


def assemble_run(*words: str) -> Assembly:
    run = compose(Run, "tiny", [*WORDS, *words]).value
    return assemble(run, Decided.here(run), reads=False)


def plant(device: str | None = None, path: Path | None = None) -> list[str]:
    """A file in which the reference wins on each case of the run. Returns their names."""
    names = [case.name for case in job.run_cases("tiny", WORDS)]
    path = path or winners_file()
    assert path is not None
    write_winners(path, {device or tuned_device(): {name: {"implementation": "reference"} for name in names}})
    return names


def text(a: Assembly) -> str:
    return a.lower().as_text()


def test_without_a_file_nothing_is_chosen_and_nothing_is_traced(monkeypatch: pytest.MonkeyPatch):
    a = assemble_run()
    monkeypatch.setattr(Assembly, "lower", lambda _: pytest.fail("traced"))
    assert with_winners(a) == a.decided
    assert a.decided.winners is None
    assert Decided(**{"layers": "scan", "precision": "float32"}).winners is None, "as old runs were"


def test_a_run_takes_the_winner_of_its_shapes(monkeypatch: pytest.MonkeyPatch):
    (name,) = plant()
    a = assemble_run()
    plain = text(a)
    a.decided = with_winners(a)
    assert winners_of(a) == {name: "reference"}
    assert text(a) == text(assemble_run("execution.attention=reference")) != plain
    a.decided = Decided(**json.loads(json.dumps(vars(a.decided) | {"winners": {"another kind": {name: "reference"}}})))
    assert text(a) == plain, "a run that resumes on another kind of device"
    for other in (assemble_run("data.sequence=64"), assemble_run("execution.attention=blocked")):
        assert with_winners(other).winners is None
    devices(2, monkeypatch)
    assert with_winners(assemble_run()).winners is None


def test_winners_of_another_kind_of_device_are_not_taken():
    plant("TPU v5")
    assert with_winners(assemble_run()).winners is None


def test_a_named_file_is_read_or_it_is_a_mistake(cache: Path, monkeypatch: pytest.MonkeyPatch):
    path = cache / "shared.json"
    monkeypatch.setenv("ARGOSY_TUNED", str(path))
    with pytest.raises(BadInput, match="holds no winners"):
        with_winners(assemble_run())
    plant(path=path)
    assert with_winners(assemble_run()).winners
    file = winners_file()
    assert file is not None
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("{")
    assert stored_winners(file) == {}, "a torn file of the cache is none"


def test_a_run_keeps_its_winners_when_the_file_is_gone(cache: Path):
    (name,) = plant()
    run = cache / "run"
    words = [*WORDS, f"dir={run}", "checkpoint.every=1"]
    train("tiny", [*words, "steps=1"], Quiet())
    file = winners_file()
    assert file is not None
    file.unlink()
    train("tiny", [*words, "steps=2"], Quiet())
    meta = Checkpoints(run / "checkpoints").meta(2)
    assert meta["decided"]["winners"] == {tuned_device(): {name: "reference"}}
    assert (run / "log.txt").read_text().count("attention by `reference`") == 2


def test_the_verb_keeps_what_was_measured(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The default is planted slow, so another wins; once it is as fast as ever, the winner is forgotten."""
    shared = cache / "shared.json"
    with monkeypatch.context() as planted:
        planted.setitem(ATTENTION._items, "blocked", Implementation(lambda *a, **m: later(attention_reference(*a, **m), 0.02)))
        assert main(["autotune", "tiny", *WORDS, "ops=attention", "seconds=0.01", f"out={shared}", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (case,) = document["cases"]
    assert case["winner"] == "reference"
    assert [entry["implementation"] for entry in case["implementations"]] == ["blocked", "reference"]
    file = winners_file()
    assert file is not None
    winners = json.loads(file.read_text())
    assert winners == json.loads(shared.read_text())
    assert winners[tuned_device()][case["case"]]["implementation"] == "reference"
    assert winners[tuned_device()][case["case"]]["jax"] == jax.__version__
    with monkeypatch.context() as planted:
        planted.setitem(ATTENTION._items, "reference", Implementation(lambda *a, **m: later(attention_reference(*a, **m), 0.02)))
        assert main(["autotune", "tiny", *WORDS, "ops=attention", "seconds=0.01"]) == 0
    assert "reference" in capsys.readouterr().out
    assert json.loads(file.read_text())[tuned_device()].get(case["case"], {}).get("implementation") != "reference"


def test_what_cannot_be_tuned_is_a_mistake(monkeypatch: pytest.MonkeyPatch):
    settings = job.AutotuneSettings()
    with pytest.raises(BadInput, match="no op `conv`"):
        job.tuned_document(None, [], settings.model_copy(update={"ops": "conv"}), print)
    with pytest.raises(BadInput, match="none of the ops experts"):
        job.tuned_document("tiny", WORDS, settings.model_copy(update={"ops": "experts"}), print)
    devices(2, monkeypatch)
    with pytest.raises(Unsupported, match="this run has 2"):
        job.run_cases("tiny", WORDS)
    assert main(["autotune", "model.width=32"]) == 2


def test_the_usual_shapes_are_those_of_implementations():
    cases = job.usual_cases()
    assert {case.op for case in cases} == set(job.OPS)
    assert len({case.name for case in cases}) == len(cases)
