"""A run directory. All names of its files are defined here.

    settings.yml     resolved settings, each with who set it
    metrics.jsonl    one line per logged step, evaluation and sample
    checkpoints/     <step>/
    tokenizer/       the tokenizer of the data
    adapter/         what a run of adapters trained, for the PEFT library
    reference.json   sha256 of the weights that the run compares with; reference/  their log-probabilities of each sequence
    teacher.json     the frozen model beside the trained one (a teacher, or the UNet that a ControlNet steers or that reads a learned
                     token): where it is, and sha256 of the files of its weights
    text_encoder.json  text_encoder_2.json  the same of the encoders that a learned token is for
    learned_embeds.safetensors  what a run of textual inversion trained, for diffusers
    rollbacks.json   the batches that rollbacks left out
    evaluations.jsonl  one line per `argosy eval` of the run
    life/            where its time went, over all starts; a file for each process (`observe.life`)
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
# What DreamBooth draws before its first step.
CLASS_IMAGES = "class_images"
# A PEFT folder, where the run trains adapters.
ADAPTER = "adapter"
# What `argosy quickstart` did with the run, for its report.
STORY = "quickstart.json"
GENERATION = "generation_config.json"
# The weights that preferences are compared with, and the log-probabilities of each split's sequences by them.
REFERENCE, LOGPS = "reference.json", "reference/{split}.npy"
# The frozen model beside the trained one: a teacher, or a UNet that is steered.
TEACHER = "teacher.json"
# What a run went back from: step, the checkpoint restored, and the first and last batch left out.
ROLLBACKS = "rollbacks.json"
# One line per `argosy eval`: time, step, the settings that were given, and the numbers of each task.
EVALUATIONS = "evaluations.jsonl"

# Identifies a run with local checkpoints; hidden, since it is written before anything else.
ID = ".run"

T = TypeVar("T", bound=Settings)


class RunDirectory:
    """The files of one run.

    Args:
        address: a local folder, or any address of `core.storage`.
        settings: what to keep; None for readers, which never remove a checkpoint.
        warn: called with a sentence when damage is found.
        writes: whether this process writes the files of the run; of several, the leader does. Checkpoints are written by all.
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
        """The folder on this machine, or the address elsewhere."""
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
        """Whether a step was made after the rollbacks that went back to before it."""
        made_after = meta.get("rollbacks", [])
        return all(rollback in made_after for rollback in self.rollbacks() if rollback["restored"] < step)

    @property
    def id(self) -> str:
        """An id that distinguishes this run from any other and from its own copies, so that local checkpoints of another run are never
        resumed from.
        """
        if not self.store.exists(ID):
            self.store.write_text(ID, uuid4().hex[:12] + "\n")
        where = str(self.path.resolve()) if self.store.is_local else self.store.root
        return f"{self.store.read_text(ID).strip()}-{hashlib.sha256(where.encode()).hexdigest()[:8]}"

    @property
    def has_run(self) -> bool:
        return self.store.exists(SETTINGS)

    def steps(self) -> list[int]:
        """Committed steps, oldest first."""
        inside = self.store.list(CHECKPOINTS)
        names = [n for n in inside if n.isdecimal() and self.store.exists(f"{CHECKPOINTS}/{n}/{manifest.NAME}")]
        return sorted(map(int, names))

    def add_evaluation(self, document: Mapping[str, Any]) -> None:
        """Adds the results of an evaluation."""
        self.store.append_line(EVALUATIONS, json.dumps(document, ensure_ascii=False))
        self.store.flush()

    def evaluations(self) -> list[dict[str, Any]]:
        """The results of all evaluations, oldest first; lines that a kill has torn are left out."""
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
        """The sha256 of the weights that the run compares with; None if it is not known yet."""
        return json.loads(self.store.read_text(REFERENCE))["weights"] if self.store.exists(REFERENCE) else None

    def write_reference_weights(self, sha256: str) -> None:
        self.store.write_text(REFERENCE, json.dumps({"weights": sha256}) + "\n")

    def teacher(self, name: str = TEACHER) -> dict[str, Any] | None:
        """The stored description of the frozen model beside the trained one; None if there is none yet. name: of the file."""
        return json.loads(self.store.read_text(name)) if self.store.exists(name) else None

    def write_teacher(self, description: Mapping[str, Any], name: str = TEACHER) -> None:
        self.store.write_text(name, json.dumps(description) + "\n")

    def rollbacks(self) -> list[dict[str, Any]]:
        """The rollbacks of the run, oldest first."""
        return json.loads(self.store.read_text(ROLLBACKS)) if self.store.exists(ROLLBACKS) else []

    def write_rollbacks(self, rollbacks: list[dict[str, Any]]) -> None:
        self.store.write_text(ROLLBACKS, json.dumps(rollbacks, indent=1) + "\n")

    def read_reference(self, split: str, documents: int) -> "np.ndarray | None":
        """The reference's log-probabilities of a split's documents; None if they are not there, or of other data."""
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
            BadInput: the run here has other settings, each difference named; or the directory holds something else, or cannot be
                written.
        """
        if self.has_run:
            return self.admit_resume(self.stored()[0], reading.value)
        self.check_place()
        if self.steps():
            raise BadInput(f"{self} holds checkpoints but no {SETTINGS}", hint="dir=NEW starts a run elsewhere")
        # A run killed before its settings were written leaves a log, and may have made a tokenizer or drawn images.
        if set(self.store.list()) - {TOKENIZER, LOG, LOCK, LIFE, CLASS_IMAGES}:
            raise BadInput(f"{self} is not empty and holds no run", hint="dir=NEW names another directory")

    def missing(self) -> list[Path]:
        """The folders that a start will make: that of the run, and those above it that do not exist, the innermost first."""
        if not (self.store.is_local and self.writes):
            return []
        folder = self.path.absolute()
        return [place for place in (folder, *folder.parents) if not place.exists()]

    def remove_unused(self, folders: Sequence[Path]) -> None:
        """Removes what a start made that was refused: these folders, if the run's has nothing but its lock, which this process holds,
        and a log."""
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
        """Checks that a local directory can be created and written; a remote one is not tried.

        Raises:
            BadInput: it cannot.
        """
        if self.store.is_local:
            _check_place(self.path)

    def admit_resume(self, stored: Mapping[str, Any], settings: Settings) -> None:
        """Checks that a run with the stored settings may go on with these.

        Raises:
            BadInput: it may not; each difference is named.
        """
        changed = differences(stored, settings)
        if not changed:
            return
        listed = "; ".join(f"{key}: {_format(before)} there, {_format(now)} now" for key, before, now in changed)
        raise BadInput(f"{self} holds a run with other settings", where=listed, hint=_way_out(self, changed, settings))

    def stored(self) -> tuple[dict[str, Any], dict[str, str]]:
        """The settings of the run here and who set each: from its newest checkpoint, or from settings.yml before the first one.

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
                # The checkpoint is damaged; the one before it has the same settings.
                continue
        # An editor may have put a byte-order mark.
        text = self.store.read_text(SETTINGS).removeprefix("\ufeff")
        return dict(yaml_text_layer(text, SETTINGS).values), {}

    def with_provenance(self, reading: Reading[T]) -> Reading[T]:
        """The reading, with settings that have not changed since the run began keeping their original provenance."""
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
        """Saves the tokenizer with the generation settings of its model. Files that are there are kept, except those that a kill
        cut short.

        Args:
            write_more: writes further files of the model into a folder.
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
        """The generation settings that `write_tokenizer` saved; empty if there are none."""
        name = f"{TOKENIZER}/{GENERATION}"
        return json.loads(self.store.read_text(name)) if self.store.exists(name) else {}

    def write_file(self, file: "File") -> None:
        """Replaces a file of the run."""
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
        """Replaces the adapters of the run. write: writes them into a folder that does not exist yet."""
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
        """An empty folder, in the run directory if that is local, so that files can be renamed into place."""
        if not self.store.is_local:
            with tempfile.TemporaryDirectory() as scratch:
                yield Path(scratch)
            return
        # The lock is held, so a folder of this name was left by a kill.
        scratch = self.path / f".{TOKENIZER}.part"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _is_cut_short(self, name: str, complete: Path) -> bool:
        """Whether the file is missing, or holds only the beginning of the complete one."""
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
    """Whether this is a run directory, on this machine or at an address: a folder with a settings.yml."""
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
    """What to type instead. With another learning rate, batch or seed, another run can start from the state of this one."""
    keys = [key for key, _, _ in changed]
    if not run.steps():
        return "it has no checkpoint yet: give the same settings to start it again, or dir=NEW to start another run"
    same = "give the same settings to resume"
    if any(key.startswith("model.") for key in keys):
        return f"{same}, or dir=NEW to start another run"
    optimizer = any(key.startswith("optimizer.") and not key.endswith("learning_rate") for key in keys)
    # A state is that of a tokenizer and of all weights.
    adapts = any(key.startswith("adapter") for key in keys) or not getattr(getattr(settings, "adapter", None), "trains_base", True)
    if optimizer or adapts or "data.tokenizer" in keys:
        return f"{same}; init.weights={run} dir=NEW starts another run from its weights"
    return f"{same}; init.state={run} dir=NEW starts another run from its weights, optimizer and step"


def _check_place(path: Path) -> None:
    """Checks that the directory can be created, before anything is built that would be lost."""
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
    """The settings of a run at an address, as the local file of a run directory is read.

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
    """The resolved settings in a run's settings.yml."""
    return yaml_layer(path / SETTINGS).values
