"""The table of features that do not combine. All rows that a run violates are reported at once. A documentation page is generated from
the table.

A row says that two features are not implemented together, or cannot work together, and what to do instead. Rules about sizes that must
divide and files that must exist are checked elsewhere (`run.settings.run`, `run.assembly`). This file imports no jax.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from argosy.core.errors import BadInput, UserError


@dataclass(frozen=True)
class Situation:
    """A run and the machine that it starts on.

    run: the settings of the run.
    processes: the number of processes.
    platform: cpu, gpu or tpu; None as long as the devices are not known.
    """

    run: Any
    processes: int = 1
    platform: str | None = None


class Feature(NamedTuple):
    """A feature that a run may use.

    name: the name of the feature for users; a setting if there is one.
    used: (situation) -> whether the run uses the feature.
    """

    name: str
    used: Callable[[Situation], bool]


class Conflict(NamedTuple):
    """Two features that do not combine.

    feature, other: the keys of the two features in `FEATURES`.
    reason: the reason why they do not combine.
    hint: the advice what to do instead.
    """

    feature: str
    other: str
    reason: str
    hint: str


def _of_run(used: Callable[[Any], Any]) -> Callable[[Situation], bool]:
    return lambda situation: bool(used(situation.run))


def _splits_axis(axis: str) -> Callable[[Situation], bool]:
    return _of_run(lambda run: run.mesh.splits(axis))


def _experts_balanced_over_batch(run: Any) -> bool:
    experts = getattr(run.model, "experts", None)
    return experts is not None and experts.balance_over == "batch"


FEATURES: dict[str, Feature] = {
    "processes": Feature("several processes", lambda situation: situation.processes > 1),
    "stage_on_cpu": Feature("mesh.stage on CPUs", lambda s: s.platform == "cpu" and s.run.mesh.splits("stage")),
    "stage": Feature("mesh.stage", _splits_axis("stage")),
    "context": Feature("mesh.context", _splits_axis("context")),
    "expert": Feature("mesh.expert", _splits_axis("expert")),
    "rollouts": Feature("rollouts", _of_run(lambda run: run.rollout is not None)),
    "rollout_processes": Feature("rollout.processes", _of_run(lambda run: run.rollout and run.rollout.processes is not None)),
    "rollout_int8": Feature("rollout.weights=int8", _of_run(lambda run: run.rollout and run.rollout.weights != "same")),
    "environment": Feature("an environment", _of_run(lambda run: run.environment.played)),
    "samples": Feature("sample.every", _of_run(lambda run: run.sample.every)),
    "reference": Feature("a reference", _of_run(lambda run: run.objective.roles.get("reference"))),
    "teacher": Feature("a teacher", _of_run(lambda run: "teacher" in run.objective.roles)),
    "cached_teacher": Feature("objective.logits=cached", _of_run(lambda run: run.objective.roles.get("teacher") == "cached")),
    "other_objective": Feature(
        "another objective than next_token", _of_run(lambda run: type(run.objective).__name__ != "NextToken")
    ),
    "adapter": Feature("an adapter", _of_run(lambda run: not run.adapter.trains_base)),
    "quantized_training": Feature("quant.train", _of_run(lambda run: run.quant.train != "none")),
    "delayed_scaling": Feature("quant.scaling=delayed", _of_run(lambda run: run.quant.scaling == "delayed")),
    "dropout": Feature(
        "adapter.dropout", _of_run(lambda run: not run.adapter.trains_base and getattr(run.adapter, "dropout", 0))
    ),
    "batch_balance": Feature("moe.balance_over=batch", _of_run(_experts_balanced_over_batch)),
    "accumulate": Feature("accumulate", _of_run(lambda run: run.accumulate > 1)),
    "whole_batch": Feature("an objective that compares the examples of a batch", _of_run(lambda run: run.objective.needs.whole_batch)),
    "ema": Feature("ema.decay", _of_run(lambda run: run.ema.on)),
    "averaging_optimizer": Feature("optimizer=schedule_free", _of_run(lambda run: run.optimizer.averages)),
    "gather_once": Feature("execution.gather=once", _of_run(lambda run: run.execution.gather == "once")),
    "offload": Feature("execution.offload", _of_run(lambda run: run.execution.offload != "none")),
    "offload_weights": Feature("execution.offload=weights", _of_run(lambda run: run.execution.offload == "weights")),
    "diloco": Feature("diloco.every", _of_run(lambda run: run.diloco.every)),
    "replay": Feature("guard.replay", _of_run(lambda run: run.guard.replay)),
    "rollback": Feature("guard=rollback", _of_run(lambda run: "rollback" in run.guard.actions)),
    "online_data": Feature("data.online", _of_run(lambda run: run.data.online)),
    "init_state": Feature("init.state", _of_run(lambda run: run.init.state)),
}

NOT_BUILT = "not built together yet"
_ONE_PROCESS = "use the devices of one process"
_NO_STAGES = "mesh.fsdp and mesh.tensor split the weights of every run"
_ON_DEVICE = "execution.offload=none"
_NOT_WEIGHTS = "execution.offload=optimizer"
_SUMMED = "diloco.every=0 sums gradients over mesh.data in every step"

CONFLICTS: tuple[Conflict, ...] = (
    *(Conflict("processes", other, NOT_BUILT, _ONE_PROCESS) for other in ("rollouts", "reference", "teacher")),
    Conflict("processes", "samples", NOT_BUILT, "sample.every=none; `argosy generate` draws from a checkpoint"),
    Conflict(
        "processes",
        "stage_on_cpu",
        "sums that are scattered over CPUs of several processes are wrong now and then (jax-ml/jax#40830)",
        _ONE_PROCESS,
    ),
    *(Conflict("stage", o, NOT_BUILT, _NO_STAGES) for o in ("rollouts", "samples", "teacher", "dropout", "batch_balance")),
    Conflict("context", "rollouts", NOT_BUILT, "mesh.fsdp and mesh.tensor split their work"),
    *(Conflict("offload", other, NOT_BUILT, _ON_DEVICE) for other in ("stage", "rollouts", "diloco", "replay")),
    *(
        Conflict("offload_weights", other, NOT_BUILT, _NOT_WEIGHTS)
        for other in ("adapter", "gather_once", "samples", "reference", "teacher")
    ),
    *(
        Conflict("diloco", other, NOT_BUILT, _SUMMED)
        for other in ("rollouts", "other_objective", "adapter", "init_state", "stage", "expert", "gather_once")
    ),
    *(Conflict("ema", other, NOT_BUILT, "leave `ema.decay` out") for other in ("rollouts", "diloco", "offload")),
    *(Conflict("averaging_optimizer", other, NOT_BUILT, "optimizer=adamw") for other in ("ema", "rollouts", "diloco", "offload")),
    Conflict("adapter", "init_state", NOT_BUILT, "model=FOLDER or init.weights=FOLDER names the model to put the adapter on"),
    Conflict("quantized_training", "adapter", NOT_BUILT, "adapter=qlora trains adapters on a quantized base"),
    *(Conflict("quantized_training", other, NOT_BUILT, "quant.train=none") for other in ("rollout_int8", "offload_weights")),
    *(Conflict("delayed_scaling", other, NOT_BUILT, "quant.scaling=dynamic") for other in ("stage", "diloco", "offload")),
    Conflict(
        "rollouts", "rollback", "rollouts depend on the weights, so a position alone does not bring them back", "guard: skip or stop"
    ),
    Conflict(
        "rollouts", "dropout", "the policy that is trained would be another one than the one that is sampled", "adapter.dropout=0"
    ),
    Conflict(
        "whole_batch",
        "accumulate",
        "an example is compared with the others of its part of the batch alone, which is another loss",
        "accumulate=1; execution.remat=full saves memory",
    ),
    Conflict(
        "rollouts", "accumulate", "the parts of an update follow from the lengths of completions (rollout.rows)", "accumulate=1"
    ),
    Conflict(
        "rollout_processes",
        "environment",
        "completions of several turns are sampled in the process that trains",
        "leave `rollout.processes` out",
    ),
    Conflict("rollout_int8", "adapter", "a frozen base is rounded by its adapter", "adapter=qlora rounds the base to fewer bits"),
    Conflict(
        "cached_teacher",
        "online_data",
        "the cache computes what the teacher says of each row once, and data.online reads no row twice",
        "objective.logits=online, or leave `data.online` off",
    ),
)


def violations(situation: Situation) -> Iterator[UserError]:
    """Yields an error for each row of the table that a run violates."""
    used = {key for key, feature in FEATURES.items() if feature.used(situation)}
    for conflict in CONFLICTS:
        if {conflict.feature, conflict.other} <= used:
            first, second = FEATURES[conflict.feature].name, FEATURES[conflict.other].name
            yield BadInput(f"{first} and {second} do not combine: {conflict.reason}", hint=conflict.hint)


def combinations_table() -> str:
    """Returns the table as Markdown."""
    rows = (
        f"| {FEATURES[conflict.feature].name} | {FEATURES[conflict.other].name} | {conflict.reason} | {conflict.hint} |"
        for conflict in CONFLICTS
    )
    return "\n".join(["| feature | other feature | why not | instead |", "| --- | --- | --- | --- |", *rows])
