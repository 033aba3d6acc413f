"""A family in a package of its own: one file, one line that registers it, and everything acts on it.

tests/fixtures/starcoder2.py was written by docs/new-family.md. It is held to the laws of our own families and to transformers
(tests/reference/variants.py, OUTSIDE). Laws that cost little are called here. All of them run, with the longer proofs, in a
process of their own, started as that package's author would start them.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from inspect import signature
from pathlib import Path

import jax
import numpy as np
import pytest
from golden_weights import write_model
from helpers import LOGIT_ROUNDING, relative
from laws import test_family
from laws.families import CASES
from safetensors.numpy import load_file

import argosy
from argosy.core.errors import Unsupported
from argosy.jobs.convert import convert
from argosy.jobs.models import describe
from argosy.models import FAMILIES

TESTS = Path(__file__).parents[1]
FILE, LAWS = TESTS / "fixtures" / "starcoder2.py", TESTS / "laws" / "test_family.py"
GOLDENS = TESTS / "goldens" / "outside"
NAME, WHERE = "starcoder2", "fixtures.starcoder2:Starcoder2Config"
MOST_LINES = 120
PROMPT = 11  # tokens of a golden's greedy row that are given


@pytest.fixture(scope="module", autouse=True)
def register_family() -> Iterator[None]:
    """Known to this module's tests alone. A registry has no way back: only tests want one."""
    FAMILIES.add(NAME, WHERE)
    yield
    del FAMILIES._items[NAME]


@pytest.fixture(scope="module", params=["starcoder2-plain", "starcoder2-window"])
def case(request: pytest.FixtureRequest, tmp_path_factory) -> tuple[Path, argosy.LM, dict[str, np.ndarray]]:
    """A golden's model as a folder, what we make of it, and what the reference says."""
    folder = write_model(GOLDENS / request.param, tmp_path_factory.mktemp("outside") / request.param)
    return folder, argosy.load(folder), dict(np.load(GOLDENS / request.param / "golden.npz"))


# ---------------------------------------------------------------- the file


def test_it_is_short_and_uses_public_names_alone():
    source = FILE.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= MOST_LINES
    tree = list(ast.walk(ast.parse(source)))
    imported = [
        f"{node.module}.{name.name}" for node in tree if isinstance(node, ast.ImportFrom) for name in node.names
    ]
    ours = [name for name in imported if name.startswith("argosy.")]
    assert ours
    assert all(name.startswith(("argosy.models.", "argosy.core.keymap.")) for name in ours), ours
    assert {name.name for node in tree if isinstance(node, ast.Import) for name in node.names} <= {"jax", "numpy"}
    used = [part for name in imported for part in name.split(".")]
    used += [node.attr for node in tree if isinstance(node, ast.Attribute)]
    assert not [name for name in used if name.startswith("_")]


# ---------------------------------------------------------------- the laws


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> str:
    """The last of its examples, among the cases of the laws for one test."""
    monkeypatch.setitem(CASES, NAME, FAMILIES[NAME].examples()["window"])
    return NAME


TRACED = ["bfloat16_meets_float32_by_rule", "counts_are_those_of_what_is_built", "flops_are_those_of_the_trace"]
TRACED += ["hub_folder_gives_the_model_again", "layouts_convert_without_a_change"]


@pytest.mark.parametrize("name", TRACED)
def test_it_obeys_the_laws_that_compile_nothing(name: str, example: str, monkeypatch: pytest.MonkeyPatch):
    law = getattr(test_family, f"test_{name}")
    law(example, monkeypatch) if "monkeypatch" in signature(law).parameters else law(example)


def test_it_decodes_from_pages(example: str, monkeypatch: pytest.MonkeyPatch):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        full = test_family.whole(example)[:3]
        test_family.test_paged_decode_equals_full(example, "scan", lambda case: full, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("example", ["window", "bare"])
def test_it_obeys_every_law(example: str, tmp_path: Path):
    """`pytest -p PACKAGE tests/laws -k FAMILY`, where importing the package registers the family."""
    (tmp_path / "outside.py").write_text(
        f"from argosy.models import FAMILIES\n\nFAMILIES.add({NAME!r}, {WHERE!r})\n", encoding="utf-8"
    )
    path = os.pathsep.join([str(tmp_path), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    picked = f"{NAME}-{example} or test_every_family_has_an_example or test_by_default"
    words = ["-p", "outside", "-p", "no:cacheprovider", "-rA", "-k", picked, "-m", ""]  # slow laws too
    run = subprocess.run(
        [sys.executable, "-m", "pytest", str(LAWS), *words],
        cwd=TESTS.parent,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    laws = set(re.findall(r"^def (test_\w+)", LAWS.read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"^PASSED \S+::(test_\w+)", run.stdout, re.MULTILINE)) == laws


# ---------------------------------------------------------------- the reference


def test_logits_equal_the_reference(case):
    _, lm, golden = case
    assert relative(lm.logits(golden["tokens"]), golden["logits"]) < LOGIT_ROUNDING


@pytest.mark.slow
def test_greedy_text_equals_the_reference(case):
    _, lm, golden = case
    row = golden["greedy"].tolist()
    completions = lm.generate([row[:PROMPT]], max_tokens=len(row) - PROMPT, temperature=0.0, ignore_eos=True)
    assert [c.tokens for c in completions] == [row[PROMPT:]]


def test_folder_to_argosy_to_folder_is_exact(case, tmp_path: Path):
    folder, lm, _ = case
    convert(str(folder), tmp_path / "argosy", "argosy", None)
    convert(str(tmp_path / "argosy"), tmp_path / "hub", "hub", None)
    assert tensors_of(tmp_path / "hub") == tensors_of(folder)
    assert argosy.load(tmp_path / "hub").config.resolved() == lm.config.resolved()


def tensors_of(folder: Path) -> dict[str, tuple]:
    """Every tensor's type, shape and bytes."""
    return {n: (w.dtype, w.shape, w.tobytes()) for n, w in load_file(folder / "model.safetensors").items()}


def test_models_show_describes_it(case):
    folder, lm, _ = case
    description = describe(str(folder))
    assert description["family"] == NAME
    assert description["parameters"] == sum(w.size for w in load_file(folder / "model.safetensors").values())
    assert description["parameters"] == lm.config.parameters()


def test_what_the_hub_cannot_say_is_refused(case):
    """It has one window for all layers: a pattern would be lost."""
    mixed = case[1].config.model_copy(update={"window": 7, "pattern": "LG"})
    with pytest.raises(Unsupported, match="pattern"):
        mixed.to_hub()
