"""Runs a training: builds it from its settings, starts or resumes it, trains, evaluates and saves."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from argosy.checkpoint.run_directory import GENERATION, RunDirectory
from argosy.core.counts import plural
from argosy.core.errors import ArgosyError, UserError
from argosy.core.process import garbage
from argosy.core.process.allocator import keep_freed_memory
from argosy.core.process.signals import asked_to_stop
from argosy.core.progress import telling
from argosy.core.settings import Reading, dump, flatten
from argosy.models.diffusion.learned_embeddings import LearnedEmbeddingsConfig
from argosy.observe.goodput import Clock
from argosy.observe.life import RunLife
from argosy.observe.log import Logged
from argosy.observe.metrics import ANSWERS, Metrics
from argosy.observe.readable import format_duration
from argosy.observe.terminal.picture import memory_words
from argosy.observe.trackers.follow import Trackers
from argosy.run.assembly.shared_prompts import resumed_on
from argosy.run.code_files import changed_code
from argosy.run.outcome import Outcome, ending
from argosy.run.settings.run import Run
from argosy.weights.hub.sentence_steps import read_steps, trained_steps, write_steps

if TYPE_CHECKING:
    from argosy.run.assembly.assembly import Assembly

STOPPING = "stopping after this step, then saving; once more stops at once, without saving"

# Where the first logged step is further away than this, the time of the first step is reported.
SLOW_S = 10.0
# Said where it takes longer than a second.
DATA = "reading the data ..."


@dataclass
class Training:
    """One process of a training run.

    reading: the settings, with their provenance.
    assembly: the parts of the run.
    directory: the run directory.
    view: displays and logs messages.
    clock: counts the seconds by cause.
    command: the command that started the run.
    hub: the config.json of the model that the run starts from, which saved models inherit.
    origin: the stored model that the run starts from; None if weights are random.
    resumed: the step that the run resumes from; None for a new run.
    base: the description of the base model under adapters; empty without adapters.
    """

    reading: Reading[Run]
    assembly: "Assembly"
    directory: RunDirectory
    view: Logged
    clock: Clock
    command: str
    hub: dict[str, Any]
    origin: Any = None
    resumed: int | None = None
    base: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def begin(
        cls,
        reading: Reading[Run],
        directory: RunDirectory,
        meta: Mapping[str, Any] | None,
        view: Logged,
        clock: Clock,
        command: str,
        assembly: "Assembly | None" = None,
    ) -> "Training":
        """Builds the parts of a run that do not exist yet.

        Args:
            meta: the meta.json of the checkpoint to resume from, whose layout and precision are kept; None for a new run.
            assembly: the parts of the run, if they were built already.
        """
        from argosy.parallel import processes
        from argosy.run.assembly.assemble import assemble
        from argosy.run.assembly.decided import Decided
        from argosy.run.assembly.winners import with_winners

        settings = reading.value
        decided = Decided.here(settings) if meta is None else Decided(**meta["decided"])
        hub = dict(meta.get("hub") or {}) if meta else {}
        fresh = meta is None and assembly is None
        # A new assembly has the winners of its shapes already.
        if assembly is None or (meta is not None and assembly.decided != decided):
            with telling(view.say, DATA):
                assembly = processes.leader_first("assemble", lambda: assemble(settings, decided, say=view.say))
        if fresh:
            assembly.decided = with_winners(assembly)
        if directory.store.is_local:
            from argosy.run.disk import check_disk

            there = len(directory.steps())
            processes.run_together("disk", lambda: check_disk(assembly, directory.path, there, view.say))
        training = cls(reading, assembly, directory, view, clock, command, hub)
        if meta is not None:
            training.say_what_changed(meta)
        return training

    @property
    def settings(self) -> Run:
        return self.reading.value

    # ---------------------------------------------------------------- where the state comes from

    def fresh(self) -> Any:
        """Makes the initial state of the run."""
        state = self._first_state()
        self.hub |= self.settings.objective.config_entries
        return state

    def _first_state(self) -> Any:
        init = self.settings.init
        if init.weights:
            from argosy.run.start.initial import base_described, weights_for

            state, self.origin = weights_for(self.assembly, init.weights, self.view.say)
            # A ControlNet that begins as a copy of a UNet has a config.json of its own.
            same = type(self.origin.config) is type(self.settings.model)
            self.hub, self.base = dict(self.origin.hub) if same else {}, base_described(self.assembly, self.origin, init.weights)
            return state
        if init.state:
            from argosy.run.start.initial import state_from

            state, self.origin = state_from(self.assembly, init.state, self.view.say)
            self.hub = dict(self.origin.hub)
            return state
        if isinstance(self.settings.model, LearnedEmbeddingsConfig):
            from argosy.run.start.learned_tokens import put_first_rows

            put_first_rows(self.assembly)
            self.view.say(f"{self.settings.model.token} begins as the word {self.settings.objective.initializer}")
        with telling(self.view.say, "drawing the weights ..."):
            return self.assembly.start()

    def restored(self, step: int, frozen: Mapping[str, Any] | None = None) -> Any:
        """Reads the state of a checkpoint onto the run's devices.

        Args:
            step: the step of the checkpoint.
            frozen: the base weights under adapters, if they are loaded already; None: they are read.
        """
        from argosy.checkpoint.step.layout import STATE, WEIGHTS
        from argosy.checkpoint.step.load import load_data, load_item, load_weights
        from argosy.run.assembly.diloco import check_replicas

        folder, meta = self.directory.checkpoints.path(step), self.directory.checkpoints.meta(step)
        if frozen is None and self.assembly.adapters.base:
            from argosy.run.start.initial import base_of

            self.base = dict(meta["base"])
            frozen = base_of(self.assembly, self.base, self.view.say)
        check_replicas(self.settings, self.assembly.mesh, folder)
        frozen = dict(frozen or {})
        self.assembly.batches.restore(meta["data"], load_data(folder))
        weights, state = self.assembly.state_places()
        self.directory.checkpoints.prepare(
            step, {WEIGHTS: {n: p for n, p in weights.items() if n not in frozen}, STATE: state}
        )
        restored = self.assembly.restored(load_weights(folder, weights) | frozen, load_item(folder, STATE, state))
        self.resumed = step
        self.view.say(f"resuming from step {step} of {self.settings.steps} in {self.directory}")
        if note := resumed_on(self.assembly.decided.shared_prompts, self.assembly.mesh.devices.flat[0].platform):
            self.view.say(note)
        now, reason = self.assembly.products
        if reason:
            before = self.assembly.decided.products
            self.view.say(f"products were computed by `{before}` until step {step}, and are by `{now}` from here: `{before}` {reason}")
        return restored

    def say_what_changed(self, meta: Mapping[str, Any]) -> None:
        """Reports changed files of code, and how a changed number of steps affects the learning rate."""
        from argosy.run.assembly.assembly import scheduled_steps

        for name in changed_code(self.settings, meta.get("code", {})):
            remark = f"{name} is not the code of the run until step {meta['step']}: its file has changed"
            self.view.say(f"{remark}. The run goes on with the new one; dir=NEW starts another")
        before, step = int(meta["settings"]["steps"]), int(meta["step"])
        if before == self.settings.steps:
            return
        was = scheduled_steps(before, self.assembly.batches)
        old = self.settings.optimizer.learning_rate * float(self.settings.schedule.build(was)(step))
        new = float(self.assembly.rate(step))
        if abs(new - old) <= 1e-6 * max(old, new):
            return
        # init.state takes no state of adapters.
        way = (
            "from these weights elsewhere: init.weights"
            if self.assembly.adapters.base
            else "from this state elsewhere: init.state"
        )
        self.view.say(
            f"steps {before} -> {self.settings.steps} stretches the schedule: the learning rate of step {step + 1} is "
            f"{new:.3g}, and would have been {old:.3g}. To choose the rate yourself, start {way}={self.directory} dir=NEW "
            f"schedule=constant optimizer.learning_rate={old:.3g}"
        )

    def keep_tokenizer(self) -> None:
        """Saves the tokenizer with the run, and the generation settings of the model that the weights came from. For an encoder of
        texts, also saves how its vectors are made."""
        if self.assembly.tokenizer is None:
            return
        companions, objective = self.origin.companions if self.origin is not None else None, self.settings.objective
        write_more = None
        if objective.text_pooling is not None:
            stored = None if companions is None else read_steps(companions, objective.text_pooling)
            steps = trained_steps(objective, self.settings.data, stored)
            write_more = partial(write_steps, steps=steps, width=self.settings.model.embedding_width)
        self.directory.write_tokenizer(self.assembly.tokenizer, companions / GENERATION if companions else None, write_more)

    def settle_reference(self, state: Any, fresh: bool) -> None:
        """Prepares the reference that the objective compares with, if it has one.

        Args:
            state: the state that the run begins or resumes with.
            fresh: whether this state is the initial one.
        """
        from argosy.run.frozen import reference

        weights = reference.ReferenceWeights(self.assembly, state, fresh, self.view.say)
        reference.settle_reference(self.assembly, self.directory, weights, self.view.say)

    def settle_teacher(self) -> None:
        """Prepares the teacher that the objective learns from, and the frozen models of a diffusers folder, if the run has any."""
        from argosy.run.distillation import teacher

        if self.assembly.teacher is not None:
            teacher.settle_teacher(self.assembly, self.assembly.teacher, self.directory, self.view.say)
        for part in self.assembly.parts.values():
            part.settle(self.assembly, self.directory, self.view.say)

    # ---------------------------------------------------------------- the loop and its hooks

    def run(self, state: Any, life: RunLife) -> Outcome:
        """Trains until the last step, the end of the data, or a signal. Returns the outcome."""
        import jax

        from argosy.parallel import processes
        from argosy.run.assembly import diloco
        from argosy.run.assembly.offload import ON_CPU
        from argosy.run.hooks.evaluation import Evaluation
        from argosy.run.hooks.guarded import Guarded
        from argosy.run.hooks.image_samples import ImageSamplingHook
        from argosy.run.hooks.pace import measured_pace
        from argosy.run.hooks.periodic import Between, Every
        from argosy.run.hooks.profiling import Profiling
        from argosy.run.hooks.samples import SamplingHook
        from argosy.run.hooks.saver import Saver
        from argosy.run.memory import compiled_need
        from argosy.run.plan.brief import plan_line
        from argosy.run.plan.compiled import compile_update
        from argosy.run.several import watch_stops
        from argosy.train.loop import Meter, Now, fit

        a, settings, store = self.assembly, self.settings, self.directory.store
        metrics, answers = Metrics(store, say=self.view.say), Metrics(store, ANSWERS, self.view.say)
        trackers = self.trackers()
        last: dict[str, float] = {}
        start, begun = int(state.step), list[bool]()

        def pace(seconds: float) -> None:
            self.say_pace(seconds, a.steps - start)

        def log_step(step: int, numbers: dict[str, float]) -> None:
            last.clear()
            last.update(numbers)
            metrics.write({"step": step} | numbers)
            self.view.step(step, numbers)

        try:
            from argosy.run.header import header_of

            header = header_of(self.assembly, self.command, self.resumed)
            self.view.header(header)
            if processes.leads() and (warning := settings.schedule.unfinished(a.steps)):
                self.view.say(warning)
            self.say_example()

            if processes.leads() and (line := plan_line(a, a.steps - start)):
                self.view.say(f"plan        {line}")

            def compiled() -> tuple[Any, Any]:
                update = compile_update(a)
                need = compiled_need(a, update, (state, a.frozen))
                need.check()
                return update, need

            with self.clock("compile"), telling(self.view.say, "compiling the training step ..."):
                # One that is slow to compile would let the others wait in a step, where Gloo gives up after 30 s.
                update, need = processes.run_together("compiled", compiled)
                # Not before: it is a need of its own, and would count as the process's too.
                self.directory.checkpoints.reserve(*a.packed(state))
                if need.leaves_room:
                    keep_freed_memory()
            self.view.say(f"memory      {memory_words(need.document())}")
            if (offload := settings.execution.offload) != "none" and a.mesh.devices.flat[0].platform == "cpu":
                self.view.say(ON_CPU.format(offload))
            metrics.write({"step": int(state.step), "header": header | {"memory": need.document()}})
            trackers.start()
            life.sign()

            def keep_lines() -> None:
                # A run that resumes does not make the numbers of steps before its checkpoint again.
                metrics.flush()
                answers.flush()

            saver = Saver(a, self.reading, self.directory.checkpoints, self.hub, self.base, life.saved, keep_lines)
            guard = Guarded(self, saver, metrics, life.went_back)
            meter = Meter(self.clock, a.batches.tokens_per_batch, log_step, settings.log.every, pace, guard.watch)
            here = [device for device in a.mesh.devices.flat if device.process_index == jax.process_index()]
            comparing: Any = settings.stragglers, here, self.clock, lambda: life.step or 0, self.view.say, metrics.write
            with (
                garbage.frozen_garbage(), asked_to_stop(STOPPING) as signaled,
                watch_stops(signaled) as watch, measured_pace(*comparing) as measured,
            ):  # fmt: skip
                hooks: list[Any] = []
                if settings.rollout is not None:
                    hooks += self.begin_rollouts(saver, metrics, answers, watch.between)
                if a.evals is not None:
                    evaluation = Evaluation(a, a.steps, saver, metrics, self.view, self.clock, watch.between)
                    hooks.append(Every("evaluation", settings.eval.every, evaluation))
                hooks.append(Every("checkpoint", settings.checkpoint.every, saver))
                if settings.checkpoint.local is not None:
                    hooks.append(Between("checkpoint", settings.checkpoint.between, saver.local))
                if settings.eval.before and self.resumed is None:
                    self.evaluate_first(hooks, state)
                if settings.sample.every:
                    if settings.model.inputs == "images":
                        sampling: Any = ImageSamplingHook(a, settings, metrics, self.view, store)
                    else:
                        sampling = SamplingHook(a, settings, metrics, self.view, watch.between)
                    hooks.append(Every("samples", settings.sample.every, sampling))
                hooks = [replace(hook, do=watch.patiently(hook.do)) for hook in hooks]
                options: Any = {"process": jax.process_index(), "processes": processes.process_count()}
                profiling = Profiling(settings.profile, store.local_path() if store.is_local else None, self.clock, update,
                                      self.view.say, **options)  # fmt: skip
                before, after = profiling.hooks(watch.patiently)
                hooks = [before, *hooks, after]
                if after.due(start, False):
                    with self.clock(after.name):
                        after(Now(start, state, a.batches, False))

                def stop() -> bool:
                    life.steps()
                    begun.append(True)
                    return watch.stop()

                more: Any = {"place": a.place, "meter": meter, "interrupted": stop}
                loop = lambda state, batches, update: fit(state, batches, update, settings.steps, hooks, **more)  # noqa: E731
                state = guard.fit(state, measured(a.with_frozen(update)), loop, watch.patiently)
                with self.clock("checkpoint"):
                    self.directory.checkpoints.wait()
                if (failed := getattr(a.batches, "failed", None)) is not None and not signaled.code:
                    if int(state.step) < settings.steps:
                        raise failed
                    self.view.say(f"step {settings.steps} is saved, but its evaluation is missing: {failed.what}")
        except UserError as error:
            if not begun:
                raise
            # Exit code 2 says that no work was done.
            raise ArgosyError(error.what, where=error.where, hint=error.hint) from error
        finally:
            if not begun:
                trackers.close()
            # Before the lock on the directory is released.
            self.directory.checkpoints.close()
            a.close()
            for lines in (metrics, answers, self.directory.log_lines):
                lines.close()
            self.view.close()
        step, saved = int(state.step), max(self.directory.checkpoints.steps(), default=None)
        if step < settings.steps and not signaled.code:
            self.view.say(
                f"the data ended at step {step} of {settings.steps} (data.epochs){diloco.unfinished_outer_step(settings, step)}"
            )
        metrics.write({"step": step, "seconds": self.clock.shares()})
        outcome = Outcome(self.directory.place, step, settings.steps, signaled.code, last, self.clock.shares(), saved)
        self.view.end(ending(outcome))
        metrics.close()
        trackers.close()
        self.directory.log_lines.close()
        return outcome

    def trackers(self) -> Trackers:
        """Opens the trackers of the run. Only the first of several processes has them."""
        import jax

        from argosy.observe.trackers.base import FOLDER, TrackedRun
        from argosy.observe.trackers.follow import Follower, flat_config

        store, settings = self.directory.store, self.settings
        folder = store.local_path(FOLDER) if store.is_local else Path(FOLDER)
        name = PurePosixPath(str(self.directory.place)).name or "run"
        run = TrackedRun(name, folder, flat_config(flatten(settings)))
        names = [dump(settings)["track"][i]["name"].rpartition(":")[2] for i in range(len(settings.track))]
        # Two of one kind have files of their own.
        files = [n if names.count(n) == 1 else f"{n}{i}" for i, n in enumerate(names)]
        followers = [Follower(n, tracker, store, run, self.view.say) for n, tracker in zip(files, settings.track, strict=True)]
        return Trackers(followers if jax.process_index() == 0 else [])

    def evaluate_first(self, hooks: Sequence[Any], state: Any) -> None:
        """Evaluates the initial weights, with the hook that evaluates later ones."""
        from argosy.train.loop import Now

        for hook in hooks:
            if hook.name == "evaluation":
                with self.clock("evaluation"):
                    hook(Now(int(state.step), state, self.assembly.batches, False))

    def begin_rollouts(self, saver: Any, metrics: Metrics, answers: Metrics, stop: Callable[[], bool]) -> list[Any]:
        """Starts sampling for the rollouts. Returns the hooks of rollouts.

        Args:
            answers: the file that receives some of the completions.
            stop: returns whether to stop.
        """
        from argosy.run.hooks.periodic import Every
        from argosy.run.rl.begin import CompletionEvaluation, begin_rollouts, completion_recorder
        from argosy.run.rl.parts import rollouts_of

        a, record = self.assembly, completion_recorder(answers, self.view)
        begin_rollouts(a, self.hub, self.directory.generation(), self.view.say, record, stop)
        if not self.settings.eval.batches or rollouts_of(a).batches.held_out is None:
            return []
        evaluation = CompletionEvaluation(a, saver, metrics, self.view, self.clock)
        return [Every("evaluation", self.settings.eval.every, evaluation)]

    def say_example(self) -> None:
        """Shows the first record or prompt as the model sees it, unless the run resumes."""
        from argosy.data.inspect import example, prompt_text

        batches, tokenizer = self.assembly.batches, self.assembly.tokenizer
        if self.resumed is not None:
            return
        if self.assembly.rollouts is not None:
            text = prompt_text(self.assembly.rollouts.first_prompt(), tokenizer)
            self.view.say(f"the first prompt; its completions come at ⟦...⟧\n{text}\n")
        elif (first_record := batches.example()) is not None:
            self.view.say(
                f"the first record; what is in ⟦ ⟧ does not count in the loss:\n{example(first_record, tokenizer)}\n"
            )

    def say_pace(self, seconds: float, steps: int) -> None:
        """Reports how long `steps` steps will take, if it takes long until the first logged step.

        Args:
            seconds: the time of a step in seconds.
        """
        if seconds * self.settings.log.every >= SLOW_S:
            self.view.say(
                f"a step takes {format_duration(seconds)}: about {format_duration(seconds * steps)} for {plural(steps, 'step')}"
            )
