"""Reads and writes the files of a run directory, and defines their names.

    settings.yml     the resolved settings, and who set each of them
    metrics.jsonl    one line per logged step, evaluation and sample
    checkpoints/     <step>/
    tokenizer/       the tokenizer of the data
    adapter/         the trained adapters, in the format of the PEFT library
    reference.json   sha256 of the weights of the reference model
    reference/       log-probabilities of each sequence under the reference model
    teacher.json     path and sha256 of the weights of the frozen model beside the trained one: a teacher, or the UNet that a ControlNet
                     steers or that reads a learned token
    text_encoder.json  text_encoder_2.json  the same for the text encoders that a learned token is for
    learned_embeds.safetensors  the embeddings that textual inversion trained, in the format of diffusers
    rollbacks.json   the batches that rollbacks left out
    evaluations.jsonl  one line per `argosy eval` of the run
    life/            how the run spent its time, over all starts, a file for each process (`observe.life`)
    log.txt  report.html  quickstart.json

It may be a local folder or any address that `core.storage` knows. Importing this module imports no jax.
"""

import hashlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from argosy.checkpoint.resume import Difference, differences
from argosy.core.addresses import is_address, local_path
from argosy.core.errors import ArgosyError, BadInput, Damaged
from argosy.core.locks import LOCK
from argosy.core.settings import Reading, Settings, SettingsLayer, dump, flatten, yaml_layer, yaml_text_layer
from argosy.core.settings.explain import annotated_yaml
from argosy.core.storage import ReadOnly, Store
from argosy.observe.backlog import Backlog
from argosy.observe.life import FOLDER as LIFE
from argosy.weights import manifest

if TYPE_CHECKING:
    import numpy as np

    from argosy.checkpoint.checkpoints import Checkpoints
    from argosy.checkpoint.settings import CheckpointSettings
    from argosy.checkpoint.tiers.tiered import TieredCheckpoints
    from argosy.core.formats.files import File

SETTINGS, LOG, REPORT, TOKENIZER, CHECKPOINTS = "settings.yml", "log.txt", "report.html", "tokenizer", "checkpoints"
# The class images that DreamBooth draws before its first step.
CLASS_IMAGES = "class_images"
# A PEFT folder, where the run trains adapters.
ADAPTER = "adapter"
# What `argosy quickstart` did with the run, for the report.
STORY = "quickstart.json"
GENERATION = "generation_config.json"
# The hash of the reference model's weights, and its log-probabilities of the sequences of each split.
REFERENCE, LOGPS = "reference.json", "reference/{split}.npy"
# The frozen model beside the trained one: a teacher, or a UNet that is steered.
TEACHER = "teacher.json"
# One entry per rollback: the step, the restored checkpoint, and the first and last batch that were left out.
ROLLBACKS = "rollbacks.json"
# One line per `argosy eval`: time, step, the given settings, and the results of each task.
EVALUATIONS = "evaluations.jsonl"

# Identifies a run with local checkpoints. The file is hidden because it is written before anything else.
ID = ".run"

T = TypeVar("T", bound=Settings)


class RunDirectory:
    """The files of one run.

    Args:
        address: a local folder, or any address of `core.storage`.
        settings: which checkpoints to keep. None is for readers, which never remove a checkpoint.
        warn: called with a sentence when damage is found.
        writes: whether this process writes the files of the run. If there are several processes, only the leader does. All of them
            write checkpoints.
    """

    def __init__(
        self,
        address: str | Path,
        settings: "CheckpointSettings | None" = None,
        warn: Callable[[str], None] = lambda _: None,
        writes: bool = True,
    ):
        self.store = (Store if writes else ReadOnly)(local_path(address))
        self.settings, self.warn, self.writes = settings, warn, writes

    def __str__(self) -> str:
        return self.store.root

    @property
    def place(self) -> Path | str:
        """The folder of a local run, or the address of a remote one."""
        return self.path if self.store.is_local else self.store.root

    @property
    def path(self) -> Path:
        """The folder on this machine.

        Raises:
            BadInput: the run is remote.
        """
        return self.store.local_path()

    @cached_property
    def checkpoints(self) -> "Checkpoints | TieredCheckpoints":
        from argosy.checkpoint.checkpoints import Checkpoints

        persistent = Checkpoints(self.store.child(CHECKPOINTS), self.settings, self.warn)
        if self.settings is None or self.settings.local is None:
            return persistent
        from argosy.checkpoint.tiers.local import LocalCheckpoints
        from argosy.checkpoint.tiers.tiered import TieredCheckpoints
        from argosy.parallel import processes

        root = Path(self.settings.local).expanduser() / processes.broadcast("run id", lambda: self.id)
        shared = {"belongs": self._belongs, "memory": persistent.memory}
        return TieredCheckpoints(persistent, LocalCheckpoints(root, self.settings.local_copies, self.warn, **shared))

    def _belongs(self, step: int, meta: Mapping[str, Any]) -> bool:
        """Whether a step was made after all rollbacks to earlier steps, so that it was not undone by one."""
        made_after = meta.get("rollbacks", [])
        return all(rollback in made_after for rollback in self.rollbacks() if rollback["restored"] < step)

    @property
    def id(self) -> str:
        """An id that distinguishes this run from all others and from copies of its directory. With it, a run never resumes from the
        local checkpoints of another one.
        """
        if not self.store.exists(ID):
            self.store.write_text(ID, uuid4().hex[:12] + "\n")
        where = str(self.path.resolve()) if self.store.is_local else self.store.root
        return f"{self.store.read_text(ID).strip()}-{hashlib.sha256(where.encode()).hexdigest()[:8]}"

    @property
    def has_run(self) -> bool:
        return self.store.exists(SETTINGS)

    def steps(self) -> list[int]:
        """Returns the committed steps, oldest first."""
        inside = self.store.list(CHECKPOINTS)
        names = [n for n in inside if n.isdecimal() and self.store.exists(f"{CHECKPOINTS}/{n}/{manifest.NAME}")]
        return sorted(map(int, names))

    def add_evaluation(self, document: Mapping[str, Any]) -> None:
        """Adds the results of an evaluation, a JSON object, to evaluations.jsonl."""
        self.store.append_line(EVALUATIONS, json.dumps(document, ensure_ascii=False))
        self.store.flush()

    def evaluations(self) -> list[dict[str, Any]]:
        """Returns the results of all evaluations, oldest first. Lines that a killed process left incomplete are skipped."""
        if not self.store.exists(EVALUATIONS):
            return []
        evaluations = []
        for line in self.store.read_text(EVALUATIONS).splitlines():
            try:
                evaluations.append(dict(json.loads(line)))
            except (ValueError, TypeError):
                continue
        return evaluations

    def reference_weights(self) -> str | None:
        """Returns the sha256 of the reference model's weights; None if it is not known yet."""
        return json.loads(self.store.read_text(REFERENCE))["weights"] if self.store.exists(REFERENCE) else None

    def write_reference_weights(self, sha256: str) -> None:
        self.store.write_text(REFERENCE, json.dumps({"weights": sha256}) + "\n")

    def teacher(self, name: str = TEACHER) -> dict[str, Any] | None:
        """Returns the stored description of a frozen model beside the trained one; None if there is none yet. `name`: the file that
        holds the description."""
        return json.loads(self.store.read_text(name)) if self.store.exists(name) else None

    def write_teacher(self, description: Mapping[str, Any], name: str = TEACHER) -> None:
        self.store.write_text(name, json.dumps(description) + "\n")

    def rollbacks(self) -> list[dict[str, Any]]:
        """Returns the rollbacks of the run, oldest first."""
        return json.loads(self.store.read_text(ROLLBACKS)) if self.store.exists(ROLLBACKS) else []

    def write_rollbacks(self, rollbacks: list[dict[str, Any]]) -> None:
        self.store.write_text(ROLLBACKS, json.dumps(rollbacks, indent=1) + "\n")

    def read_reference(self, split: str, documents: int) -> "np.ndarray | None":
        """Reads the reference model's log-probabilities of a split's documents. None if they are not stored, or belong to other data.

        Args:
            documents: the number of documents of the split.
        """
        import numpy as np

        name = LOGPS.format(split=split)
        if not self.store.exists(name):
            return None
        with self.store.open(name) as file:
            data = file.read()
        try:
            logps = np.load(io.BytesIO(data))
        except (ValueError, EOFError):
            return None  # a kill tore it
        return logps if logps.shape == (documents,) else None

    def write_reference(self, split: str, table: "np.ndarray") -> None:
        import numpy as np

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "table.npy"
            np.save(path, table)
            self.store.put_file(LOGPS.format(split=split), path)

    # ---------------------------------------------------------------- may these settings run here?

    def admit(self, reading: Reading[Any]) -> None:
        """Checks that these settings may start a run here, or resume the existing one.

        Raises:
            BadInput: the existing run has other settings (the message names each difference), or the directory holds something else or
                cannot be written.
        """
        if self.has_run:
            return self.admit_resume(self.stored()[0], reading.value)
        self.check_place()
        if self.steps():
            raise BadInput(f"{self} holds checkpoints but no {SETTINGS}", hint="dir=NEW starts a run elsewhere")
        # A run that was killed before its settings were written leaves a log, and maybe a tokenizer or images.
        if set(self.store.list()) - {TOKENIZER, LOG, LOCK, LIFE, CLASS_IMAGES}:
            raise BadInput(f"{self} is not empty and holds no run", hint="dir=NEW names another directory")

    def missing(self) -> list[Path]:
        """Returns the folders that a start will create: the folder of the run and its parents, if they do not exist. The innermost
        comes first."""
        if not (self.store.is_local and self.writes):
            return []
        folder = self.path.absolute()
        return [place for place in (folder, *folder.parents) if not place.exists()]

    def remove_unused(self, folders: Sequence[Path]) -> None:
        """Removes the folders that a refused start created, unless the run has settings or files other than its log and the lock that
        this process holds.

        Args:
            folders: the result of `missing` before the start.
        """
        if not folders or self.has_run or set(os.listdir(folders[0])) - {LOCK, LOG, LIFE}:
            return
        self.log_lines.close()
        with suppress(OSError):
            shutil.rmtree(folders[0] / LIFE, ignore_errors=True)
            for name in (LOG, LOCK):
                (folders[0] / name).unlink(missing_ok=True)
            for folder in folders:
                folder.rmdir()

    def check_place(self) -> None:
        """Checks that a local directory can be created and written. Does nothing for a remote one.

        Raises:
            BadInput: the directory cannot be created or written.
        """
        if self.store.is_local:
            _check_place(self.path)

    def admit_resume(self, stored: Mapping[str, Any], settings: Settings) -> None:
        """Checks that a run with the stored settings may resume with new ones.

        Raises:
            BadInput: it may not. The message names each difference.
        """
        changed = differences(stored, settings)
        if not changed:
            return
        listed = "; ".join(f"{key}: {_format(before)} there, {_format(now)} now" for key, before, now in changed)
        raise BadInput(f"{self} holds a run with other settings", where=listed, hint=_way_out(self, changed, settings))

    def stored(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Returns the settings of the run and who set each of them. They are read from the newest good checkpoint, or from settings.yml
        before the first checkpoint.

        Raises:
            UserError: settings.yml cannot be read, and no checkpoint can be read either.
        """
        for step in reversed(self.steps()):
            try:
                text = self.store.read_text(f"{CHECKPOINTS}/{step}/meta.json")
                entry = json.loads(self.store.read_text(f"{CHECKPOINTS}/{step}/{manifest.NAME}"))["files"]["meta.json"]
                if hashlib.sha256(text.encode()).hexdigest() != entry["sha256"]:
                    continue
                meta = json.loads(text)
                return dict(meta["settings"]), dict(meta.get("origin") or {})
            except (ArgosyError, ValueError, KeyError, TypeError):
                # The checkpoint is damaged, but the one before has the same settings.
                continue
        # An editor may have put a byte-order mark.
        text = self.store.read_text(SETTINGS).removeprefix("\ufeff")
        return dict(yaml_text_layer(text, SETTINGS).values), {}

    def with_provenance(self, reading: Reading[T]) -> Reading[T]:
        """Returns the reading in which unchanged settings have the provenance that they had when the run began."""
        if not self.has_run:
            return reading
        values, origin = self.stored()
        before, now = flatten(values), flatten(dump(reading.value))
        unchanged = {key: origin[key] for key, value in now.items() if key in origin and before.get(key) == value}
        return Reading(reading.value, reading.origin | unchanged, reading.tried, reading.choices)

    # ---------------------------------------------------------------- writing

    def write_settings(self, reading: Reading[Any]) -> None:
        self.store.write_text(SETTINGS, annotated_yaml(reading))

    def write_tokenizer(
        self, tokenizer: Any, generation: Path | None = None, write_more: Callable[[Path], None] | None = None
    ) -> None:
        """Saves the tokenizer, and the generation settings of its model. Existing files are kept, except those that a killed process
        left incomplete.

        Args:
            generation: the generation_config.json of the model.
            write_more: writes further files of the model into the folder that it is called with.
        """
        if not self.writes:
            return
        with self._scratch() as scratch:
            tokenizer.save(scratch)
            if generation is not None and generation.is_file():
                shutil.copyfile(generation, scratch / GENERATION)
            if write_more is not None:
                write_more(scratch)
            if self.store.is_local and not self.store.list(TOKENIZER):
                self.store.remove(TOKENIZER)
                scratch.rename(self.path / TOKENIZER)
                return
            for file in sorted(f for f in scratch.rglob("*") if f.is_file()):
                name = f"{TOKENIZER}/{file.relative_to(scratch).as_posix()}"
                if not self._is_cut_short(name, file):
                    continue
                if self.store.is_local:
                    (self.path / name).parent.mkdir(parents=True, exist_ok=True)
                    file.replace(self.path / name)
                else:
                    self.store.put_file(name, file)

    def generation(self) -> dict[str, Any]:
        """Returns the generation settings that `write_tokenizer` saved; empty if there are none."""
        name = f"{TOKENIZER}/{GENERATION}"
        return json.loads(self.store.read_text(name)) if self.store.exists(name) else {}

    def write_file(self, file: "File") -> None:
        """Writes a file of the run, in place of an earlier one."""
        from argosy.core.formats.files import write_file

        if not self.writes:
            return
        with self._scratch() as scratch:
            write_file(scratch / file.name, file)
            if self.store.is_local:
                (scratch / file.name).replace(self.path / file.name)
            else:
                self.store.put_file(file.name, scratch / file.name)

    def write_adapter(self, write: Callable[[Path], None]) -> None:
        """Writes the adapters of the run, in place of earlier ones. `write`: writes them into the folder that it is called with, which
        does not exist yet."""
        if not self.writes:
            return
        with self._scratch() as scratch:
            write(scratch / ADAPTER)
            if self.store.is_local:
                if (self.path / ADAPTER).exists():
                    (self.path / ADAPTER).rename(scratch / "old")
                (scratch / ADAPTER).rename(self.path / ADAPTER)
                return
            for file in sorted((scratch / ADAPTER).iterdir()):
                self.store.put_file(f"{ADAPTER}/{file.name}", file)

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        """Yields an empty folder. It is in the run directory if that is local, so that files can be renamed into place."""
        if not self.store.is_local:
            with tempfile.TemporaryDirectory() as scratch:
                yield Path(scratch)
            return
        # The lock is held, so an existing folder of this name was left by a killed process.
        scratch = self.path / f".{TOKENIZER}.part"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _is_cut_short(self, name: str, complete: Path) -> bool:
        """Whether a file of the run is missing, or holds only the beginning of the complete file."""
        if not self.store.exists(name):
            return True
        size = self.store.size(name)
        if size >= complete.stat().st_size:
            return False
        with self.store.open(name) as file:
            return complete.read_bytes().startswith(file.read())

    @cached_property
    def log_lines(self) -> Backlog:
        return Backlog(self.store, LOG, self.warn)

    def log(self, line: str) -> None:
        self.log_lines.append(line)


def is_run_directory(place: str | Path) -> bool:
    """Whether a path or an address is a run directory, which is a folder with a settings.yml."""
    if not is_address(place):
        return Path(local_path(place), SETTINGS).is_file()
    return Store(place).exists(SETTINGS)


def check_run(store: Store) -> None:
    """Checks that a run is at an address.

    Raises:
        BadInput: there is no run.
    """
    if store.exists(SETTINGS):
        return
    if not store.list():
        raise BadInput(f"nothing at {store.root}", hint="the address of a run is what `dir` was when it was trained")
    raise BadInput(f"{store.root} is not a run directory", where=f"it holds no {SETTINGS}", hint="name the `dir` of a run")


def _format(value: Any) -> Any:
    return "none" if value is None else value


def _way_out(run: Any, changed: list[Difference], settings: Any) -> str:
    """Returns the hint about what to type instead. If only settings such as the learning rate, the batch or the seed have changed, a
    new run can start from the state of this one."""
    keys = [key for key, _, _ in changed]
    if not run.steps():
        return "it has no checkpoint yet: give the same settings to start it again, or dir=NEW to start another run"
    same = "give the same settings to resume"
    if any(key.startswith("model.") for key in keys):
        return f"{same}, or dir=NEW to start another run"
    optimizer = any(key.startswith("optimizer.") and not key.endswith("learning_rate") for key in keys)
    # A state belongs to a tokenizer and to all weights.
    adapts = any(key.startswith("adapter") for key in keys) or not getattr(getattr(settings, "adapter", None), "trains_base", True)
    if optimizer or adapts or "data.tokenizer" in keys:
        return f"{same}; init.weights={run} dir=NEW starts another run from its weights"
    return f"{same}; init.state={run} dir=NEW starts another run from its weights, optimizer and step"


def _check_place(path: Path) -> None:
    """Checks that the directory can be created, before work is done whose result would be lost."""
    ancestor = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not ancestor.is_dir():
        raise BadInput(f"{ancestor} is a file", hint="dir=NEW names another directory")
    try:
        with tempfile.TemporaryFile(dir=ancestor):
            pass
    except OSError as error:
        problem = (error.strerror or str(error)).lower()
        raise BadInput(f"cannot write in {ancestor}: {problem}", hint="dir=NEW names another directory") from None


def settings_elsewhere(address: str) -> SettingsLayer:
    """Reads the settings of a run at an address, as settings.yml of a local run directory is read.

    Raises:
        UserError: there is no run, or its settings cannot be read.
    """
    store = Store(address.rstrip("/"))
    check_run(store)
    try:
        # An editor may have put a byte-order mark.
        return yaml_text_layer(store.read_text(SETTINGS).removeprefix("\ufeff"), f"{store.root}/{SETTINGS}")
    except Damaged as error:
        raise BadInput(error.what, where=error.where) from None


def stored_settings(path: Path) -> Mapping[str, Any]:
    """Reads the resolved settings in a run's settings.yml."""
    return yaml_layer(path / SETTINGS).values
