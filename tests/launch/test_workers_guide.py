"""The example of docs/guides/workers.md: a trainer of two processes, and rollouts by another, as one process does both."""

import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from argosy.launch.workers.engines import here as worker_here
from argosy.launch.workers.engines.here import Here, mesh_over

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "workers.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
ROLES = next(block for block in BLOCKS if block.startswith("# roles.py\n"))
CONTROLLER = next(block for block in BLOCKS if "roles:answer" in block)
TELL = "\nimport json, sys\nprint(json.dumps(answers))\nnp.savez(sys.argv[1], **trained)\n"


@pytest.mark.slow
def test_the_trainer_and_rollouts_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import json

    (tmp_path / "roles.py").write_text(ROLES)
    (tmp_path / "controller.py").write_text(CONTROLLER + TELL)
    words = [sys.executable, "controller.py", str(tmp_path / "trained.npz")]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    monkeypatch.syspath_prepend(tmp_path)
    roles = __import__("roles")
    # The same functions, called here.
    token = worker_here.thread.set(Here("alone", 0, 1, mesh_over(jax.devices()[:1], {"data": 1})))
    try:
        namespace: dict = {}
        exec(re.search(r"prompts = .*?\n\n", CONTROLLER, re.DOTALL)[0], {"np": np}, namespace)
        weights, engine, answers = roles.make(3), roles.engine(), []
        for _ in range(3):
            answers.append(
                roles.answer(engine, {name: jax.numpy.copy(weight) for name, weight in weights.items()}, namespace["prompts"])
            )
            weights = roles.step(weights, namespace["tokens"], 0.5)
    finally:
        worker_here.thread.reset(token)
    assert json.loads(done.stdout) == answers
    assert len({str(answer) for answer in answers}) > 1
    with np.load(tmp_path / "trained.npz") as trained:
        assert set(trained) == set(weights)
        for name in weights:
            np.testing.assert_allclose(trained[name], weights[name], rtol=2e-5, atol=2e-6)


def test_the_first_example_names_what_there_is():
    from argosy.launch import workers

    assert "from argosy.launch.workers import Group, open_workers" in BLOCKS[0]
    assert all(hasattr(workers, name) for name in ("Group", "open_workers", "here", "WorkerLost", "WorkerError"))
    assert all(f"| `{name}` |" in GUIDE for name in workers.ENGINES)
