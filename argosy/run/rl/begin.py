"""Starts the rollouts of a run: the engine that samples, and the hooks that evaluate and record completions.

The engine and the trainer share devices and weights, unless `rollout.devices` is set. Before a rollout the engine's module takes the
arrays of the training state, without a copy. After the rollout the engine frees its cache, and the update donates the arrays that the
engine still refers to. With `rollout.processes` the engines are in other processes (`run.rl.rollout_workers`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from argosy.core.progress import Say
from argosy.observe.goodput import Clock
from argosy.observe.metrics import Metrics, conversation_text
from argosy.observe.readable import one_line
from argosy.rl.rollouts.records import TrajectoryRecord
from argosy.rl.rollouts.settings import Rollout
from argosy.run.assembly.assembly import Assembly
from argosy.run.hooks.periodic import is_stopping
from argosy.run.hooks.saver import Saver
from argosy.run.rl.parts import rollouts_of
from argosy.run.rl.rollout_engine import RolloutEngine
from argosy.run.rl.rollout_workers import RolloutWorkers, samplers_summary
from argosy.run.view import View

# Completions of a rollout that are kept in the run directory and shown.
KEPT = 16
# Of so many rollouts a completion of one is shown.
SHOWN = 10


def begin_rollouts(
    assembly: Assembly,
    hub: Mapping[str, Any],
    generation: Mapping[str, Any],
    say: Say,
    keep: Callable[[Sequence[TrajectoryRecord]], None],
    interrupted: Callable[[], bool],
) -> None:
    """Starts sampling for a run, before its first step: builds the engine or the sampling processes, and connects them to the rollouts.

    Args:
        hub: the config.json of the initial model, which names end-of-sequence tokens.
        generation: the generation_config.json of the initial model, which names further end-of-sequence tokens.
        say: called with messages.
        keep: called with the completions of each rollout.
        interrupted: returns whether to stop.
    """
    rollouts = rollouts_of(assembly)
    engine: Any = RolloutEngine(
        assembly.run.model,
        assembly.graph,
        assembly.shapes.params | assembly.shapes.rest,
        assembly.decided.dtype,
        assembly.tokenizer,
        _settings(assembly),
        hub,
        generation,
    )
    if _settings(assembly).processes is not None:
        engine = rollouts.workers = RolloutWorkers(engine, say)
    rollouts.batches.begin(rollouts.trainer(assembly, engine, say), say, keep, interrupted)


def rollout_header(assembly: Assembly) -> dict[str, str]:
    """Returns the header's lines about rollouts and the processes that sample."""
    settings, summary = _settings(assembly), dict(rollouts_of(assembly).summary)
    if settings.processes is None:
        return summary
    return summary | {"samplers": samplers_summary(settings, assembly.shapes.params | assembly.shapes.rest)}


def _settings(assembly: Assembly) -> Rollout:
    return assembly.run.rollout or Rollout()


class CompletionEvaluation:
    """A hook that evaluates greedy completions of held-out prompts. The best checkpoints have the lowest `RolloutParts.selection`."""

    def __init__(self, assembly: Assembly, saver: Saver, metrics: Metrics, view: View, clock: Clock):
        self.assembly, self.saver, self.metrics, self.view, self.clock = assembly, saver, metrics, view, clock

    def __call__(self, now: Any) -> None:
        a = self.assembly
        if is_stopping(now, a.steps):
            return
        numbers = rollouts_of(a).batches.evaluated(now.state, a.run.eval.batches * a.run.data.batch)
        if not numbers:
            return
        self.metrics.write({"step": now.step} | numbers)
        self.view.evaluation(now.step, numbers)
        selection = rollouts_of(a).selection(numbers)
        if selection is not None:
            with self.clock("checkpoint"):
                self.saver.evaluated(now, selection)


def completion_recorder(lines: Metrics, view: View) -> Callable[[Sequence[TrajectoryRecord]], None]:
    """Makes a function that writes some completions of each rollout to a file of the run directory, one per line, and now and then
    displays the best completion.
    """

    def record(records: Sequence[TrajectoryRecord]) -> None:
        for item in records[:KEPT]:
            lines.write({name: value for name, value in asdict(item).items() if name != "turns" or value is not None})
        best = max(records[:KEPT], key=lambda item: item.advantage)
        if best.rollout % SHOWN == 1:
            prompt = best.prompt if isinstance(best.prompt, str) else str(best.prompt[-1].get("content", ""))
            rewards = f", rewards {_rewards_text(best.rewards)}" if best.rewards else ""
            view.say(f"rollout {best.rollout}{rewards}: {one_line(prompt)} -> {one_line(conversation_text(asdict(best)))}")

    return record


def _rewards_text(rewards: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {'none' if value is None else f'{value:.3g}'}" for name, value in rewards.items())
