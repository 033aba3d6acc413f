"""Code of users in a run: the examples of the guide, keys that are checked, files that change, entry points."""

import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from argosy.core.errors import UserError
from argosy.core.registry import Registry
from argosy.core.storage import Store
from argosy.observe.metrics import read
from argosy.run.code_files import changed_code, code_hashes, named_code
from argosy.run.settings.compose import compose
from argosy.run.settings.run import Run

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "own_code.py"
GUIDE = ROOT / "docs" / "guides" / "your-own-code.md"
PARTS = ["objective=examples/own_code.py:Focal", "optimizer=examples/own_code.py:SignSGD", "schedule=examples/own_code.py:Halving"]
TINY = ["model.width=16", "model.layers=1", "model.heads=2", "model.ffn=32", "data.sequence=32", "data.batch=8", "eval.batches=1"]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_keys_of_ones_own_classes_are_checked_as_all_others():
    with pytest.raises(UserError) as caught:
        compose(Run, "tiny", [*PARTS, "objective.gama=3", "optimizer.momentum=2", "schedule.every=5"])
    text = str([problem.what for problem in getattr(caught.value, "problems", [caught.value])])
    assert "objective.gama" in text
    assert "optimizer.momentum" in text
    run = compose(Run, "tiny", [*PARTS, "objective.gamma=3", "optimizer.clip=none"]).value
    assert (run.objective.gamma, run.optimizer.clip, type(run.schedule).__name__) == (3.0, None, "Halving")


def test_an_algorithm_of_ones_own_is_an_objective():
    words = ["objective=examples/own_code.py:Centered", "reward=examples/own_code.py:short", "objective.kl=0.01"]
    run = compose(Run, "tiny", words).value
    assert run.objective.scale == "none"
    assert run.rollout is not None
    assert dict(named_code(run)) == {"objective.name": words[0][10:], "reward.0.of": words[1][7:]}


def test_a_name_that_the_file_lacks_is_answered_with_the_nearest():
    with pytest.raises(UserError) as caught:
        compose(Run, "tiny", ["optimizer=examples/own_code.py:SignSDG"])
    assert "SignSGD" in str(caught.value.problems[0].hint if hasattr(caught.value, "problems") else caught.value.hint)


def test_a_source_of_ones_own_has_its_code_in_the_fingerprint(tmp_path):
    from argosy.data.settings import DataSettings
    from argosy.data.sources.find import find_source

    copy = tmp_path / "mine.py"
    copy.write_text(FILE.read_text(encoding="utf-8"), encoding="utf-8")
    first = find_source(DataSettings(source=f"{copy}:Sums"))
    texts = [document.text for document in first.documents()]
    assert len(texts) == 10_000
    assert all(eval(text.replace("=", "==")) for text in texts[:50])
    copy.write_text(copy.read_text(encoding="utf-8") + "\n# another\n", encoding="utf-8")
    assert find_source(DataSettings(source=f"{copy}:Sums")).fingerprint() != first.fingerprint()
    with pytest.raises(UserError, match="no class of sources"):
        find_source(DataSettings(source=f"{copy}:lower"))


def test_a_changed_file_is_told_from_an_unchanged_one(tmp_path):
    copy = tmp_path / "mine.py"
    copy.write_text(FILE.read_text(encoding="utf-8"), encoding="utf-8")
    run = compose(Run, "tiny", [f"optimizer={copy}:SignSGD", f"data.source={copy}:Sums"]).value
    before = code_hashes(run)
    # The data's fingerprint has the source's.
    assert list(before) == [f"{copy}:SignSGD"]
    assert changed_code(run, before) == []
    copy.write_text("# other\n", encoding="utf-8")
    assert changed_code(run, before) == [f"{copy}:SignSGD"]
    assert changed_code(run, {}) == []


def test_an_installed_package_adds_names_by_entry_points(monkeypatch):
    entry_point = EntryPoint("mine", "argosy.train.optimizers.sgd:SGD", "argosy.things")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [entry_point] if group == "argosy.things" else [])
    registry = Registry("thing", {"first": dict})
    registry.add_installed("argosy.things")
    assert list(registry) == ["first", "mine"]
    assert registry["mine"].__name__ == "SGD"


def test_every_registry_of_a_run_has_its_group_of_entry_points():
    """Those that the guide names, and no others."""
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "argosy").rglob("*.py"))
    groups = set(re.findall(r'\.add_installed\("(argosy\.\w+)"\)', sources))
    assert groups == set(re.findall(r"`(argosy\.\w+)`", GUIDE.read_text(encoding="utf-8").partition("## Packages")[2]))
    assert len(groups) > 8


@pytest.mark.slow
def test_the_examples_run_and_a_changed_file_is_said_on_resume(tmp_path):
    """As real processes, from the command line."""
    copy = tmp_path / "mine.py"
    copy.write_text(FILE.read_text(encoding="utf-8"), encoding="utf-8")
    words = [word.replace("examples/own_code.py", str(copy)) for word in [*PARTS, "data.source=examples/own_code.py:Sums"]]
    # Data of another fingerprint would be refused.
    source = tmp_path / "sums.py"
    source.write_text(FILE.read_text(encoding="utf-8"), encoding="utf-8")
    words[-1] = f"data.source={source}:Sums"

    def train(steps):
        command = ["train", "tiny", f"dir={tmp_path / 'run'}", *words, *TINY, "log.every=1", "objective.gamma=2", f"steps={steps}"]
        done = subprocess.run([sys.executable, "-m", "argosy", *command], capture_output=True, text=True, cwd=tmp_path, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stderr

    assert "has changed" not in train(3)
    copy.write_text(copy.read_text(encoding="utf-8") + "\n# another\n", encoding="utf-8")
    output = train(6)
    assert f"{copy}:Focal is not the code of the run until step 3" in output
    assert f"{copy}:SignSGD is not the code" in output
    lines = [line for line in read(Store(tmp_path / "run")) if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(np.isfinite(line["loss"]) for line in lines)
    # The focal loss is less than the cross-entropy that is reported beside it.
    assert all(line["loss"] < line["cross_entropy"] for line in lines)
