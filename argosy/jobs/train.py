"""`argosy train`: resumes the run in the directory, or starts one; never deletes anything.

In this order: read all settings, lock the directory, build everything and check the data, ask the compiler how much memory it
takes, and only then write the first file.
"""

import os
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from argosy.checkpoint.run_directory import RunDirectory
from argosy.core.command import command_name as as_run
from argosy.core.counts import plural
from argosy.core.errors import ArgosyError, Unsupported, UserError
from argosy.core.process.allocator import share_one_arena
from argosy.core.progress import telling
from argosy.core.settings import COMMAND_LINE, Reading
from argosy.core.storage import Store
from argosy.models.diffusion.learned_embeddings import LearnedEmbeddingsConfig
from argosy.observe.goodput import Clock
from argosy.observe.life import RunLife
from argosy.observe.log import Logged
from argosy.observe.metrics import read
from argosy.observe.whereabouts import WHERE, Whereabouts
from argosy.run.outcome import Outcome
from argosy.run.settings.run import Run
from argosy.run.start.preflight import checked_settings, directory_of
from argosy.run.training import DATA, Training
from argosy.run.view import Quiet, View

if TYPE_CHECKING:
    from argosy.run.assembly.assembly import Assembly
    from argosy.weights.model import OpenedModel

__all__ = ["Quiet", "View", "run", "train"]


def train(
    recipe: str, words: list[str] | tuple[str, ...] = (), view: View | None = None, origin: str = COMMAND_LINE
) -> Outcome:
    """Trains by a recipe. If the recipe is a run directory, resumes the run there, even if the directory was moved.

    Args:
        recipe: the name of a recipe, a YAML file, or a run directory.
        words: settings as on the command line, `key=value`.
        view: the object that displays progress. None displays nothing.
        origin: who gave the words, for the provenance of settings.

    Raises:
        UserError: there is a mistake, which was found before work began.
    """
    reading = checked_settings(recipe, words, origin)
    return run(reading, directory_of(reading, recipe), view or Quiet(), command_of(recipe, words))


def command_of(recipe: str, words: Sequence[str]) -> str:
    """Returns the shell command that trains by this recipe with these words."""
    return shlex.join([as_run(), "train", str(recipe), *words])


def run(reading: Reading[Run], path: str, view: View, command: str = "") -> Outcome:
    """Trains with these settings in this directory, and writes the report.

    Raises:
        UserError: there is a mistake, which was found before work began.
        Busy: another process holds the lock of the run.
    """
    from argosy.parallel import processes
    from argosy.run import several

    share_one_arena()
    reading = replace(reading, value=reading.value.model_copy(update={"dir": str(path)}))
    settings = reading.value
    several.check_same_run(reading)
    directory = RunDirectory(path, settings.checkpoint, view.say, processes.leads())
    processes.run_together("admit", lambda: directory.admit(reading))
    assembly = None
    if not processes.broadcast("has run", lambda: directory.has_run):
        # Finds every mistake before the first file is written.
        with telling(view.say, DATA):
            assembly = checked_assembly(settings, view.say)
    missing = directory.missing()
    try:
        with processes.run_together("lock", directory.store.lock):
            try:
                # Another process may have started a run here in the meantime.
                processes.run_together("admit", lambda: directory.admit(reading))
                outcome = _train_locked(reading, directory, view, command, assembly)
            except UserError:
                # A start that is refused leaves nothing.
                directory.remove_unused(missing)
                raise
            finally:
                # Each file says what it could not write.
                with suppress(ArgosyError):
                    directory.store.flush()
    finally:
        if assembly is not None:
            assembly.close()
    if outcome.seconds and directory.store.is_local and directory.writes:
        from argosy.jobs.history.report import report

        report(directory.path)
    return outcome


def checked_assembly(settings: Run, say: Callable[[str], None] = lambda _: None) -> "Assembly":
    """Builds everything that a new run needs, which finds all mistakes. The first of several processes fills the caches of the data.

    Args:
        say: called with messages about data that are encoded.
    """
    from argosy.parallel import processes
    from argosy.run.assembly.assemble import assemble
    from argosy.run.assembly.decided import Decided
    from argosy.run.assembly.winners import with_winners
    from argosy.run.distillation.served import check_served
    from argosy.run.start.initial import check_source

    def build() -> "Assembly":
        assembly = assemble(settings, Decided.here(settings), say=say)
        assembly.decided = with_winners(assembly)
        check_source(settings, tokenizer=assembly.tokenizer)
        check_served(assembly)
        return assembly

    return processes.leader_first("assemble", build)


def _train_locked(
    reading: Reading[Run], directory: RunDirectory, view: View, command: str, assembly: "Assembly | None"
) -> Outcome:
    from argosy.parallel import processes

    settings, log = reading.value, Logged(view, directory.log)
    clock = Clock()
    with clock("start"):
        good = directory.checkpoints.latest_good()
        meta = directory.checkpoints.meta(good) if good is not None else None
        if meta is not None:
            # A local checkpoint may be newer than the checkpoint that was compared.
            processes.run_together("admit", lambda: directory.admit_resume(meta["settings"], settings))
        if good is not None and good >= settings.steps:
            fewer = f", and steps={settings.steps} asks for fewer" if good > settings.steps else f" of {settings.steps}"
            log.say(f"{directory} is done: {plural(good, 'step')}{fewer}; steps=N trains longer, for N above {good}")
            last = _last_numbers(directory)
            if meta is not None and "base" in meta:
                keep_adapter(directory, log.say)
            if isinstance(settings.model, LearnedEmbeddingsConfig):
                keep_learned_embeddings(directory)
            return Outcome(directory.place, good, settings.steps, 0, last, {}, good)
        full_reading = directory.with_provenance(reading)
        life = RunLife(Store(directory.store.root), clock, processes.rank())
        if where := os.environ.get(WHERE):
            clock.tell = Whereabouts(Path(where), lambda: life.step)
            clock.tell("start")
        training = Training.begin(full_reading, directory, meta, log, clock, command, assembly)
        state = training.fresh() if good is None else training.restored(good)
        directory.write_settings(training.reading)
        training.keep_tokenizer()
        training.settle_reference(state, fresh=good is None)
        training.settle_teacher()
    life.begins(int(state.step), processes.broadcast("life", lambda: life.about["start"]))
    try:
        outcome = training.run(state, life)
    finally:
        life.sign(ended=True)
    if training.base:
        keep_adapter(directory, log.say)
    if isinstance(settings.model, LearnedEmbeddingsConfig):
        keep_learned_embeddings(directory)
    return outcome


def newest_checkpoint(directory: RunDirectory) -> "OpenedModel | None":
    """Opens the newest good checkpoint of a run. None if there is none, or in a process that does not write the run's files."""
    if not directory.writes:
        return None
    # Opened as a reader does, because processes do not verify together here.
    checkpoints = RunDirectory(directory.store.root).checkpoints
    step = checkpoints.latest_good()
    if step is None:
        return None
    from argosy.checkpoint.open import open_model

    return open_model(checkpoints.path(step))


def keep_adapter(directory: RunDirectory, say: Callable[[str], None]) -> None:
    """Writes the adapters of a run's newest checkpoint as a PEFT folder in the run directory. Does nothing if the run trains none.

    If the process is killed before, the next start of the run writes them.
    """
    stored = newest_checkpoint(directory)
    if stored is None:
        return
    from argosy.weights.peft.writer import write_adapter

    adapted = stored.adapted
    assert adapted is not None
    try:
        base, (adapters, whole, dropout, _) = str(adapted.base.path), adapted.contents
        directory.write_adapter(lambda folder: write_adapter(folder, stored.config, adapters, base, whole, dropout))
    except Unsupported as error:
        say(f"no PEFT folder: {error.what}; `argosy convert {directory} FOLDER` merges them")


def keep_learned_embeddings(directory: RunDirectory) -> None:
    """Writes the embeddings of a learned token from a run's newest checkpoint as a file that diffusers reads, in the run directory.

    If the process is killed before, the next start of the run writes it.
    """
    stored = newest_checkpoint(directory)
    if stored is None:
        return
    from argosy.weights.hub.learned_embeddings import learned_arrays, learned_embeddings_file

    config: Any = stored.config
    directory.write_file(learned_embeddings_file(config.token, learned_arrays(config, stored.weights)))


def _last_numbers(directory: RunDirectory) -> dict[str, float]:
    """Returns the metrics of the last logged step."""
    lines = [line for line in read(directory.store) if "loss" in line]
    return {k: v for k, v in lines[-1].items() if k != "step"} if lines else {}
