"""Edits that are known to be wrong: the tests must turn red for each of them.

    ./run python tests/known_wrong.py [NUMBER ...]

Each edit is made in a copy of the tree, in a temporary folder; the tests that must catch it run there and have to fail by a
failed test, not because nothing could be collected. Before the edits they are run once unedited, and have to pass. Prints a
table; exit code 1 where an edit survives. An edit whose place is no longer in the source is an error: it must be kept up.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import helpers

ROOT = Path(__file__).parents[1]


class Edit(NamedTuple):
    """In `file`, `old` (there once) becomes `new`; `tests` must fail."""

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


PARITY, RESUME = "tests/models/test_parity.py::test_logits_equal_the_reference", "tests/jobs/test_resume.py"
EDITS = [
    Edit(
        "the mask ignored",
        "argosy/train/objectives/next_token.py",
        'mask = batch["mask"].reshape(-1)',
        'mask = jnp.ones_like(batch["mask"].reshape(-1))',
        ("tests/train/test_next_token.py::test_a_masked_target_changes_nothing",),
    ),
    Edit(
        "positions off by one in decoding",
        "argosy/infer/decode.py",
        "at = lengths[:, None]",
        "at = lengths[:, None] + 1",
        ("tests/infer/test_lm.py::test_greedy_equals_recomputing_everything_rows_of_unequal_length",),
    ),
    Edit(
        "the window forgotten",
        "argosy/models/llama.py",
        "Score(c.H**-0.5, c.window)",
        "Score(c.H**-0.5)",
        (f"{PARITY}[mistral-window]",),
    ),
    Edit(
        "BOS twice before a text",
        "argosy/infer/lm.py",
        "[self.tokenizer.bos, *ids] if",
        "[self.tokenizer.bos, self.tokenizer.bos, *ids] if",
        ("tests/infer/test_encode.py",),
    ),
    Edit(
        "BOS twice before a conversation",
        "argosy/infer/lm.py",
        "return self.tokenizer.encode(text, special=True)",
        "return [self.tokenizer.bos, *self.tokenizer.encode(text, special=True)]",
        ("tests/infer/test_encode.py",),
    ),
    Edit(
        "Adam where Muon belongs",
        "argosy/train/optim.py",
        "if not meaning.is_matrix:",
        "if not meaning.is_matrix or stored > 2:",
        ("tests/train/test_optim.py::test_muon_sees_the_true_matrix_of_each_layer_and_expert",),
    ),
    Edit(
        "decay on norms",
        "argosy/train/optim.py",
        'self.decay == "all" or bool(m.inner)',
        "True",
        ("tests/train/test_optim.py::test_adamw",),
    ),
    Edit(
        "a stale manifest accepted",
        "argosy/checkpoint/manifest.py",
        "if describe(path) != expected:",
        'if describe(path)["bytes"] != expected["bytes"]:',
        ("tests/checkpoint/test_manifest.py", "tests/checkpoint/test_store.py"),
    ),
    Edit(
        "data restarted from zero",
        "argosy/jobs/train.py",
        'self.assembly.batches.restore(directory.checkpoints.meta(step)["data"])',
        "self.assembly.batches.rewind()",
        (f"{RESUME}::test_a_run_that_stopped_at_a_checkpoint",),
    ),
    Edit(
        "int8 scale on the wrong axis",
        "argosy/adapt/quant.py",
        "if letter in of.inner)",
        "if letter in of.kept)",
        ("tests/laws/test_family.py::test_int8_stays_near",),
    ),
    Edit(
        "a penalty's sign",
        "argosy/infer/sample.py",
        'logits - settings["presence_penalty"]',
        'logits + settings["presence_penalty"]',
        ("tests/infer/test_sample.py::test_penalties_by_hand",),
    ),
]


def copy_of_the_tree(folder: Path) -> Path:
    tree = folder / "tree"
    for name in ("argosy", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    return tree


def environment(tree: Path) -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "1",
        "ARGOSY_TEST_DATA": str(helpers.DATA),
    }


def pytest_in(tree: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """Exit code (0: passed, 1: tests failed, others: could not run) and output."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
        cwd=tree,
        env=environment(tree),
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def made(tree: Path, edit: Edit) -> str:
    """Makes an edit; returns the text to put back."""
    before = (tree / edit.file).read_text()
    if before.count(edit.old) != 1:
        raise SystemExit(f"error: {edit.what}: `{edit.old}` is {before.count(edit.old)} times in {edit.file}")
    (tree / edit.file).write_text(before.replace(edit.old, edit.new))
    return before


def tried(tree: Path, edit: Edit) -> tuple[str, str]:
    """caught, survived or broken; and the first test that failed."""
    before = made(tree, edit)
    try:
        code, output = pytest_in(tree, edit.tests)
    finally:
        (tree / edit.file).write_text(before)
    failed = re.search(r"^FAILED \S+?::(\S+)", output, re.MULTILINE)
    if code == 0:
        return "survived", ""
    return ("caught", failed[1]) if code == 1 and failed else ("broken", output.strip().splitlines()[-1][:80])


def main(words: list[str]) -> int:
    chosen = [EDITS[int(word) - 1] for word in words] or EDITS
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_of_the_tree(Path(folder))
        where = [sys.executable, "-c", "import argosy; print(argosy.__file__)"]
        imported = subprocess.run(where, cwd=tree, env=environment(tree), capture_output=True, text=True).stdout
        if not imported.startswith(str(tree)):
            raise SystemExit(f"error: the copy is not what is tested, but {imported.strip()}")
        code, output = pytest_in(tree, tuple(dict.fromkeys(test for edit in chosen for test in edit.tests)))
        if code:
            raise SystemExit(f"error: the tests fail without any edit:\n{output[-2000:]}")
        survived = 0
        for edit in chosen:
            begin = time.monotonic()
            end, by = tried(tree, edit)
            survived += end != "caught"
            print(f"{edit.what:34}{end:9} {time.monotonic() - begin:5.0f} s  {by}", flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} caught")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
