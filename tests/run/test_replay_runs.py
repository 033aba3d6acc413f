"""Runs that make steps twice: they change nothing, and find what should not be."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from campaign_kill import SMALL
from helpers import Heard, default, flip_bit

from argosy.jobs.quickstart.proof import digest
from argosy.jobs.train import train
from argosy.run.assembly.assembly import Assembly
from argosy.run.hooks.replay import Corrupted

WORDS = [*SMALL, "checkpoint.every=2", "steps=8", "data.batch=16"]
# Every device holds all weights; by default they are split, and there are no copies.
COPIES = ["mesh.data=-1", "mesh.fsdp=1"]


def fit(run: Path, *words: str) -> Any:
    return train("tiny", [*WORDS, f"dir={run}", *words], Heard())


def newest_step(run: Path) -> int:
    return max(int(step_folder.name) for step_folder in (run / "checkpoints").iterdir())


def spoil_steps(monkeypatch: pytest.MonkeyPatch, spoil: Any) -> None:
    """Calls `spoil(number of the call, state)` on what the compiled step returns."""
    compile_, calls = Assembly.compile, [0]

    def compiled(self: Assembly) -> Any:
        program = compile_(self)

        class Spoiled:
            memory_analysis = program.memory_analysis

            def __call__(self, *args: Any) -> Any:
                calls[0] += 1
                state, metrics = program(*args)
                return spoil(calls[0], state), metrics

        return Spoiled()

    monkeypatch.setattr(Assembly, "compile", compiled)


def bit(state: Any, device: int) -> Any:
    name = "layers.0.mlp.up.w"
    return jax.tree_util.tree_map_with_path(
        lambda path, a: flip_bit(a, device, 3) if jax.tree_util.keystr(path).startswith(f".params['{name}']") else a, state
    )


@pytest.mark.slow
@pytest.mark.parametrize("mesh", default(COPIES, of=[COPIES, ["mesh.data=4", "mesh.fsdp=2"]]))
def test_steps_that_are_made_twice_change_nothing(tmp_path: Path, mesh: list[str]):
    fit(tmp_path / "plain", *mesh)
    fit(tmp_path / "twice", "guard.replay=3", *mesh)
    assert digest(tmp_path / "twice", 8) == digest(tmp_path / "plain", 8)


def test_a_bit_of_one_copy_of_a_weight_is_found_and_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Flipped after step 4, the last comparison that passed is that of step 3, and the next is that of step 6."""
    spoil_steps(monkeypatch, lambda call, state: bit(state, 5) if call == 4 + 1 else state)
    with pytest.raises(Corrupted, match="copies of the state differ between devices after step 6") as raised:
        fit(tmp_path / "run", "guard.replay=3", "checkpoint.every=1", *COPIES)
    assert f"{jax.devices()[5]} of process 0; " in (raised.value.where or "")
    assert "params.layers.0.mlp.up.w" in (raised.value.where or "")
    assert "checkpoints up to step 3" in (raised.value.hint or "")
    assert newest_step(tmp_path / "run") == 5


def test_a_step_that_does_not_give_the_same_twice_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Calls 4 and 5 are both of step 4: the first of them comes out otherwise on one device."""
    spoil_steps(monkeypatch, lambda call, state: bit(state, 2) if call == 4 else state)
    with pytest.raises(Corrupted, match="step 4 was computed twice from the same state and batch") as raised:
        fit(tmp_path / "run", "guard.replay=4", *COPIES)
    assert f"on {jax.devices()[2]} of process 0; params.layers.0.mlp.up.w" in (raised.value.where or "")
    assert newest_step(tmp_path / "run") == 2


def test_the_copy_is_counted(tmp_path: Path):
    from argosy.run.assembly.assemble import assemble
    from argosy.run.assembly.decided import Decided
    from argosy.run.memory import compiled_need
    from argosy.run.settings.compose import compose
    from argosy.run.settings.run import Run

    settings = compose(Run, "tiny", [*WORDS, "guard.replay=3", "mesh.data=1"]).value
    a = assemble(settings, Decided.here(settings))
    need = compiled_need(a, a.compile())
    state_bytes = sum(np.prod(array.shape) * 4 for array in jax.tree.leaves((a.shapes.params, a.shapes.optimizer)))
    assert need.sizes["replay"] == pytest.approx(state_bytes, rel=0.01)
    a.close()
