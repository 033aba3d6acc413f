"""Our training step beside Tunix's PeftTrainer: the same model, rows, order and AdamW, all weights or LoRA; the loss of every step.

    python -m venv ENV && ENV/bin/pip install 'ROOT[tunix]'                # ROOT: a checkout of Argosy
    ENV/bin/python bench/tunix_cpu.py [STEPS]

stories260K of ../shared/data on its 1,100 instructions, several a row. Both start from the same arrays; what Tunix trains is our own
module in the form that it calls (`adapt.tunix`). Printed are losses at some steps, and the largest relative difference over all of
them; the exit status is 1 where that is above 1e-3.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from flax import nnx
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig  # type: ignore[import-not-found]

from argosy.adapt.tunix import ForTunix
from argosy.run.assembly.assemble import assemble
from argosy.run.assembly.decided import Decided
from argosy.run.settings.compose import compose
from argosy.run.settings.run import Run
from argosy.run.start.initial import weights_for

SHARED = Path(__file__).parents[2] / "shared" / "data"
MODEL, DATA = SHARED / "models" / "stories260k", SHARED / "instruct" / "instruction_1100.jsonl"
STEPS, SEQUENCE, BATCH, SAME = 100, 192, 4, 1e-3
# The most sequences in a row.
ROOM = 24
ADAM = {"b1": 0.9, "b2": 0.999, "eps": 1e-8}
WAYS = {"SFT, all weights": (1e-4, []), "LoRA, rank 8": (3e-3, ["adapter=lora", "adapter.rank=8", "adapter.alpha=16"])}


class Recorded:
    """Keeps the loss of each step, in place of Tunix's metrics logger."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def log(self, prefix: str, name: str, value: Any, mode: Any, step: int | None) -> None:
        if name == "loss":
            self.losses.append(float(value))

    def metric_exists(self, *_: Any) -> bool:
        return False

    def close(self) -> None:
        pass


def rows_of(batch: Any) -> dict[str, np.ndarray]:
    """One of our batches for Tunix, which takes the targets from the tokens themselves: every sequence of a row with its last target
    behind it, and whether each token counts as a target."""
    fields = {name: np.asarray(batch[name]) for name in ("tokens", "targets", "segments", "mask")}
    shape = len(fields["tokens"]), SEQUENCE + ROOM
    rows = {"tokens": np.zeros(shape, np.int32), "segments": np.zeros(shape, np.int32), "mask": np.zeros(shape, np.float32)}
    for row in range(shape[0]):
        at = 0
        for segment in range(1, fields["segments"][row].max() + 1):
            columns = np.flatnonzero(fields["segments"][row] == segment)
            here = slice(at, at := at + len(columns) + 1)
            rows["tokens"][row, here] = [*fields["tokens"][row, columns], fields["targets"][row, columns[-1]]]
            rows["mask"][row, here] = [0, *fields["mask"][row, columns]]
            rows["segments"][row, here] = segment
    return rows


def as_tunix(rows: dict[str, Any]) -> dict[str, Any]:
    """The arguments of Tunix's own loss."""
    segments = rows["segments"]
    causal = jnp.tril(jnp.ones((segments.shape[1],) * 2, bool))
    seen = causal & (segments[:, :, None] == segments[:, None]) & (segments[:, None] > 0)
    positions = jnp.zeros_like(segments)
    return {"input_tokens": rows["tokens"], "input_mask": rows["mask"], "positions": positions, "attention_mask": seen}


def losses(steps: int, rate: float, words: list[str], folder: Path) -> tuple[list[float], list[float]]:
    """The losses of our steps, and of Tunix's."""
    common = [f"model={MODEL}", f"data.source={folder / 'data.jsonl'}", f"data.sequence={SEQUENCE}", f"data.batch={BATCH}"]
    common += ["data.held_out=0", f"data.cache={folder / 'cache'}", f"steps={steps}", "schedule.warmup=0"]
    common += [f"optimizer.learning_rate={rate}", "optimizer.clip=null", "optimizer.b2=0.999", "optimizer.weight_decay=0"]
    run = compose(Run, "sft", [*common, *words, "eval.batches=0"]).value
    assembly = assemble(run, Decided.here(run))
    state, _ = weights_for(assembly, str(MODEL), lambda _: None)
    batches = [next(assembly.batches) for _ in range(steps)]
    assembly.close()

    recorded = Recorded()
    theirs = ForTunix(SimpleNamespace(config=run.model, module=nnx.clone(assembly.model)))
    config = TrainingConfig(eval_every_n_steps=steps + 1, max_steps=steps)
    trainer = PeftTrainer(theirs, optax.adamw(rate, **ADAM, weight_decay=0.0), config, metrics_logger=recorded)
    with_rows = trainer.with_gen_model_input_fn(as_tunix)
    # Tunix writes a step's loss one step late, and the last one when it closes.
    with_rows.train([rows_of(batch) for batch in batches])

    update, ours = assembly.compile(), list[float]()
    for batch in batches:
        state, metrics = update(state, assembly.place(batch), {})
        ours.append(float(metrics["loss"]))
    return ours, recorded.losses


def main() -> int:
    steps, worst = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS, 0.0
    # Its progress bar warns in each step of a metric that this logger does not keep.
    logging.set_verbosity(logging.ERROR)
    folder = Path(tempfile.mkdtemp())
    rows = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]
    plain = [{"prompt": f"{r['instruction']}\n{r['input']}\n", "completion": r["output"]} for r in rows]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in plain), encoding="utf-8")
    shown_steps = sorted({1, 2, steps // 4, steps // 2, steps})
    print("| | " + " | ".join(f"step {step}" for step in shown_steps) + " | largest relative difference |")
    print("|---|" + "---|" * (len(shown_steps) + 1))
    try:
        for name, (rate, words) in WAYS.items():
            ours, theirs = losses(steps, rate, words, folder)
            assert len(ours) == len(theirs) == steps, f"{len(ours)} and {len(theirs)} losses"
            apart = float(np.max(np.abs(np.array(ours) - theirs) / np.abs(theirs)))
            worst = max(worst, apart)
            for who, series in ((f"{name}: ours", ours), ("Tunix", theirs)):
                figures = " | ".join(f"{series[step - 1]:.6f}" for step in shown_steps)
                print(f"| {who} | {figures} | {f'{apart:.1e}' if series is ours else ''} |", flush=True)
    finally:
        shutil.rmtree(folder)
    return int(worst > SAME)


if __name__ == "__main__":
    sys.exit(main())
