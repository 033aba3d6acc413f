"""`argosy train`: go on from what the directory holds, or start; never delete.

The order is that of a careful person: read all settings, take the directory, build everything and look at the data, and only
then write the first file.
"""

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from argosy.core.settings import Reading, dump
from argosy.core.signals import asked_to_stop
from argosy.jobs.compose import compose
from argosy.jobs.directory import TOKENIZER, RunDirectory
from argosy.jobs.run import Run
from argosy.observe.goodput import Clock
from argosy.observe.log import Logged
from argosy.observe.metrics import Metrics, read

GENERATION = "generation_config.json"
STOPPING = "stopping after this step, then saving; once more stops at once, without saving"


class View(Protocol):
    """Whoever shows a run: the terminal, a test, nobody."""

    def say(self, text: str) -> None: ...

    def plan(self, facts: Mapping[str, Any]) -> None: ...

    def step(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def evaluation(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def sample(self, step: int, text: str) -> None: ...

    def close(self) -> None: ...


class Quiet:
    """Shows nothing."""

    def say(self, text: str) -> None: ...

    def plan(self, facts: Mapping[str, Any]) -> None: ...

    def step(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def evaluation(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def sample(self, step: int, text: str) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """What became of a run. exit_code: 0 done, 130 after Ctrl-C, 143 after SIGTERM, the state saved in each case."""

    dir: Path
    step: int
    steps: int
    exit_code: int
    last: Mapping[str, float]
    seconds: Mapping[str, float]

    @property
    def done(self) -> bool:
        return self.step >= self.steps


def train(recipe: str, words: list[str] | tuple[str, ...] = (), view: View | None = None) -> Outcome:
    """Trains by a recipe.

    Raises:
        UserError: a mistake found before work began.
    """
    reading = compose(Run, recipe, words)
    path = reading.value.dir or f"runs/{Path(recipe).stem}"
    return run(reading, path, view or Quiet())


def run(reading: Reading[Run], path: str, view: View) -> Outcome:
    """Trains with these settings in this directory, and writes its report."""
    settings = reading.value
    directory = RunDirectory(path, settings, view.say)
    directory.admit(reading)
    if not directory.has_run:
        from argosy.jobs.assemble import Decided, assemble
        from argosy.jobs.initial import check_source

        assemble(settings, Decided.here(settings)).close()  # every mistake before the first file
        check_source(settings)
    with directory.store.lock():
        outcome = _locked(reading, directory, view)
    if outcome.seconds:
        from argosy.jobs.report import report

        report(directory.path)
    return outcome


def _locked(reading: Reading[Run], directory: RunDirectory, view: View) -> Outcome:
    settings, view = reading.value, Logged(view, directory.log)
    clock = Clock()
    with clock("start"):
        good = directory.checkpoints.latest_good()
        meta = directory.checkpoints.meta(good) if good is not None else None
        if good is not None and good >= settings.steps:
            view.say(f"{directory.path} is done: {good} steps of {settings.steps}")
            return Outcome(directory.path, good, settings.steps, 0, last_numbers(directory), {})
        session = Session.begin(settings, meta, view, clock)
        state = session.restored(directory, good) if good is not None else session.fresh()
        directory.write_settings(reading)
        if session.assembly.tokenizer is not None and not (directory.path / TOKENIZER).exists():
            session.assembly.tokenizer.save(directory.path / TOKENIZER)
            session.keep_generation(directory.path / TOKENIZER)
    return session.train(state, directory)


def last_numbers(directory: RunDirectory) -> dict[str, float]:
    """What the last logged step told."""
    told = [line for line in read(directory.store) if "loss" in line]
    return {k: v for k, v in told[-1].items() if k != "step"} if told else {}


@dataclass
class Session:
    """One process's part of a run."""

    settings: Run
    assembly: Any
    view: View
    clock: Clock
    last: dict[str, float] = field(default_factory=dict)
    eval_losses: dict[int, float] = field(default_factory=dict)
    hub: dict[str, Any] = field(default_factory=dict)  # the config.json that the weights came with
    origin: Any = None  # the model they came from, at rest

    @classmethod
    def begin(cls, settings: Run, meta: Mapping[str, Any] | None, view: View, clock: Clock) -> "Session":
        from argosy.jobs.assemble import Decided, assemble

        decided = Decided.here(settings) if meta is None else Decided(**meta["decided"])
        hub = dict(meta.get("hub") or {}) if meta else {}
        return cls(settings, assemble(settings, decided), view, clock, hub=hub)

    # ---------------------------------------------------------------- where the state comes from

    def fresh(self) -> Any:
        init = self.settings.init
        if init.weights:
            from argosy.jobs.initial import weights_for

            state, self.origin = weights_for(self.assembly, init.weights, self.view.say)
            self.hub = dict(self.origin.hub)
            return state
        if init.state:
            from argosy.jobs.initial import state_from

            return state_from(self.assembly, init.state, self.view.say)
        return self.assembly.start()

    def restored(self, directory: RunDirectory, step: int) -> Any:
        from argosy.checkpoint.store import STATE, load_item, load_weights

        folder = directory.checkpoints.path(step)
        self.assembly.batches.restore(directory.checkpoints.meta(step)["data"])
        weights, state = self.assembly.state_places()
        restored = self.assembly.restored(load_weights(folder, weights), load_item(folder, STATE, state))
        self.view.say(f"going on from step {step} of {self.settings.steps} in {directory.path}")
        return restored

    def keep_generation(self, folder: Path) -> None:
        """How the model that the weights came from is meant to generate goes with them."""
        there = self.origin.companions if self.origin is not None else None
        if there is not None and (there / GENERATION).is_file():
            shutil.copyfile(there / GENERATION, folder / GENERATION)

    # ---------------------------------------------------------------- the loop and its hooks

    def train(self, state: Any, directory: RunDirectory) -> Outcome:
        from argosy.train.loop import Meter, fit

        a, settings, metrics = self.assembly, self.settings, Metrics(directory.store)
        facts, data = self.facts(), a.batches.summary(settings.steps).text
        metrics.write({"step": int(state.step), "facts": facts | {"corpus": data}})
        self.view.plan(facts)
        self.view.say(data)
        with self.clock("compile"):
            update = a.compile()

        def tell(step: int, numbers: dict[str, float]) -> None:
            self.last = numbers
            metrics.write({"step": step} | numbers)
            self.view.step(step, numbers)

        hooks: list[Any] = []
        if a.evals is not None:
            hooks.append(Every("evaluation", settings.eval.every, self.evaluation(metrics)))
        hooks.append(Every("checkpoint", settings.checkpoint.every, self.saving(directory)))
        if settings.sample.every:
            hooks.append(Every("samples", settings.sample.every, self.sampling(metrics)))
        meter = Meter(self.clock, a.batches.tokens_per_batch, tell, settings.log.every)
        try:
            with asked_to_stop(STOPPING) as stop:
                state = fit(
                    state, a.batches, update, settings.steps, hooks, place=a.place, meter=meter, interrupted=stop
                )
                with self.clock("checkpoint"):
                    directory.checkpoints.wait()
        finally:
            directory.checkpoints.join()  # before the lock on the directory is let go
            a.close()
            self.view.close()
        step = int(state.step)
        if step < settings.steps and not stop.code:
            self.view.say(f"the data ended at step {step} of {settings.steps} (data.epochs)")
        metrics.write({"step": step, "seconds": self.clock.shares()})
        return Outcome(directory.path, step, settings.steps, stop.code, self.last, self.clock.shares())

    def evaluation(self, metrics: Metrics) -> Callable[[Any], None]:
        compiled: list[Any] = []

        def evaluate(now: Any) -> None:
            if now.last and now.step < self.settings.steps:  # asked to stop: save, and go
                return
            if not compiled:
                compiled.append(self.assembly.compile_evaluation())
            numbers = self.evaluate(compiled[0], now.state)
            self.eval_losses[now.step] = numbers["eval_loss"]
            metrics.write({"step": now.step} | numbers)
            self.view.evaluation(now.step, numbers)

        return evaluate

    def is_stopping(self, now: Any) -> bool:
        """Asked to stop: save, and go."""
        return now.last and now.step < self.settings.steps

    def evaluate(self, program: Any, state: Any) -> dict[str, float]:
        """The loss on held-out text, its perplexity, and bits for each byte of text."""
        evals = self.assembly.evals
        evals.rewind()
        sums = [program(state, self.assembly.place(batch)) for batch in evals]
        total, weight = sum(float(s.total) for s in sums), sum(float(s.weight) for s in sums)
        loss = total / max(weight, 1e-30)
        numbers = {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, 700.0))}
        if evals.bytes_per_token:
            numbers["eval_bits_per_byte"] = loss / math.log(2) / evals.bytes_per_token
        return numbers

    def saving(self, directory: RunDirectory) -> Callable[[Any], None]:
        def save(now: Any) -> None:
            meta = {
                "step": now.step,
                "decided": vars(self.assembly.decided),
                "data": now.batches.state(),
                "eval_loss": self.eval_losses.get(now.step),
                "model": dump(self.settings)["model"],
                "hub": self.hub,
                "settings": dump(self.settings),
            }
            weights, state = self.assembly.packed(now.state)
            directory.checkpoints.save(now.step, weights, state, meta)

        return save

    def sampling(self, metrics: Metrics) -> Callable[[Any], None]:
        from argosy.jobs.samples import Sampler

        sampler = Sampler(self.assembly, self.settings)

        def sample(now: Any) -> None:
            if self.is_stopping(now):
                return
            text = sampler(now.state)
            metrics.write({"step": now.step, "sample": text})
            self.view.sample(now.step, text)

        return sample

    def facts(self) -> dict[str, Any]:
        """What is about to be done."""
        a = self.assembly
        return {
            "parameters": a.parameters,
            "steps": self.settings.steps,
            "tokens_per_step": a.batches.tokens_per_batch,
            "flops_per_step": a.flops_per_step,
            "devices": a.mesh.size,
            "device": a.mesh.devices.flat[0].device_kind,
            "precision": a.decided.precision,
            "layers": a.decided.layers,
        }


@dataclass(frozen=True)
class Every:
    """A hook that runs every so many steps, and at the last."""

    name: str
    every: int
    do: Callable[[Any], None]

    def due(self, step: int, last: bool) -> bool:
        return last or step % self.every == 0

    def __call__(self, now: Any) -> None:
        self.do(now)
