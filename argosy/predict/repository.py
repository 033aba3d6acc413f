"""A repository of models: `REPOSITORY/NAME/VERSION/`. Each version is a bundle, and its number an integer above 0.

    vision/1/manifest.json ...      vision/2/manifest.json ...      vision/config.yml (optional)
    embed.bundle/manifest.json ...  a bundle without a number is version 1 of a model with the name of the folder
    search/config.yml               with `ensemble:`, version 1 of a model whose steps are other models

REPOSITORY may also be one bundle, or the versions of one model.

A version is loaded once its manifest is complete and every file has its hash, so a version that is still being copied is ignored. A new
version is ready before the old one is unloaded, and the old one first finishes its requests. Versions are loaded one at a time, in a
separate thread. The event loop reads `models` and `versions` concurrently, so these are replaced and never changed in place.
"""

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from argosy.core.errors import ArgosyError, BadInput, FailedElsewhere, UserError, complaint, problems_of
from argosy.core.process.resident import trim
from argosy.core.progress import Say
from argosy.core.settings import read_settings, yaml_layer
from argosy.export.bundle import Bundle
from argosy.export.manifest import MANIFEST, BundleManifest
from argosy.ops.programs.store import ProgramStore
from argosy.predict.batching import Batcher
from argosy.predict.ensemble import Ensemble, MemberNotReady, circle_of, ensemble_order
from argosy.predict.metrics import PredictMetrics
from argosy.predict.settings import ModelSettings, PredictSettings

CONFIG = "config.yml"


@dataclass(eq=False)
class LoadedVersion:
    """A version that is ready.

    stamp: the times and sizes of its files, by which a later version at the same path is recognized.
    loaded: the time of loading, in seconds since 1970.
    """

    model: str
    version: int
    path: Path
    bundle: Bundle | Ensemble
    batcher: Batcher | Ensemble
    stamp: Any
    loaded: float = field(default_factory=time.time)


@dataclass
class ModelState:
    """The state of a model.

    path: the folder of the model.
    settings: the settings in the model's `config.yml`.
    versions: the ready versions by number.
    reasons: the reasons why other versions are not ready.
    refused: the stamps of versions that could not be loaded. They are tried again once a file changes.
    unloaded: whether a request unloaded the model. Scans of the repository then do not load it.
    idle: whether the model is an ensemble with a member that a request unloaded.
    said: the messages that need not be repeated.
    """

    path: Path
    settings: ModelSettings
    versions: Mapping[int, LoadedVersion] = field(default_factory=dict)
    reasons: Mapping[int, str] = field(default_factory=dict)
    refused: dict[int, Any] = field(default_factory=dict)
    unloaded: bool = False
    idle: bool = False
    said: set[str] = field(default_factory=set)


class UnknownVersion(Exception):
    """The model or version does not exist, or is not ready.

    status: the HTTP status.
    """

    def __init__(self, message: str, status: int = 404):
        super().__init__(message)
        self.message, self.status = message, status


class Repository:
    """The models of a folder, and their ready versions.

    Args:
        path: the folder.
        settings: the settings of the server.
        metrics: the counters of the server.
        say: called with a message when a version is loaded, refused or unloaded.
        store: the store of compiled programs.
        open_bundle: opens a bundle as `Bundle.open` does, possibly in several processes.
    """

    def __init__(
        self,
        path: Path,
        settings: PredictSettings,
        metrics: PredictMetrics,
        say: Say,
        store: ProgramStore | None = None,
        open_bundle: Callable[..., Bundle] = Bundle.open,
    ):
        self.path, self.settings, self.metrics, self.say, self.store = path, settings, metrics, say, store
        self.open_bundle = open_bundle
        self.models: Mapping[str, ModelState] = {}
        self._loading = threading.Lock()
        self._loader = ThreadPoolExecutor(1, "loads models")
        self._stop = threading.Event()

    # ---------------------------------------------------------------- what is there

    def folders(self) -> dict[str, Path]:
        """Returns the folder of each model, by name."""
        if _numbered(self.path):
            # One bundle, or the versions of one model.
            return {self.settings.name or _model_name(self.path): self.path}
        folders = {}
        for folder in sorted(self.path.iterdir()):
            if folder.is_dir() and not folder.name.startswith("."):
                if (folder / MANIFEST).is_file():
                    folders[_model_name(folder)] = folder
                elif any(_number(child) for child in folder.iterdir() if child.is_dir()) or _is_ensemble(folder):
                    folders[folder.name] = folder
        return folders

    def state(self, name: str) -> ModelState:
        """Returns the state of a model.

        Raises:
            UnknownVersion: there is no such model.
        """
        if (state := self.models.get(name)) is None:
            raise UnknownVersion(f"unknown model `{name[:128]}`; there are {', '.join(self.models) or 'none'}")
        return state

    def find(self, name: str, version: str | None = None, label: str | None = None) -> LoadedVersion:
        """Returns the requested version, or the newest one if neither a version nor a label is given.

        Raises:
            UnknownVersion: the version does not exist, or is not ready.
        """
        state = self.state(name)
        versions, reasons, labels = state.versions, state.reasons, state.settings.labels
        if label is not None:
            if label not in labels:
                raise UnknownVersion(f"model `{name}` has no label `{label[:64]}`; it has {_listed(labels)}")
            version = str(labels[label])
        if version is None:
            if not versions:
                raise UnknownVersion(f"model `{name}` is not ready: {next(iter(reasons.values()), 'it is not loaded')}", 503)
            return versions[max(versions)]
        number = int(version) if version.isdecimal() and len(version) < 19 else -1
        if number in versions:
            return versions[number]
        if number in reasons:
            raise UnknownVersion(f"version {number} of model `{name}` is not ready: {reasons[number]}", 503)
        raise UnknownVersion(f"model `{name}` has no version `{version[:32]}`; ready are {_listed(sorted(versions))}")

    # ---------------------------------------------------------------- loading

    def look(self) -> None:
        """Scans the repository: loads new versions, reloads changed ones, and unloads removed ones."""
        with self._loading:
            folders = self.folders()
            removed = [state for name, state in self.models.items() if name not in folders]
            self.models = {name: state for name, state in self.models.items() if name in folders}
            for state in removed:
                self._let_go(state, {})
            for name, folder in folders.items():
                state = self.models.get(name)
                if state is not None and state.unloaded:
                    continue
                self._load(name, folder)
            self._plan_ensembles()

    async def load(self, name: str) -> None:
        """Loads a model, or reloads it if its files have changed.

        Raises:
            UnknownVersion: there is no such model, or none of its versions can be loaded.
        """
        await asyncio.get_running_loop().run_in_executor(self._loader, self._load_named, name)

    def _load_named(self, name: str) -> None:
        with self._loading:
            folders = self.folders()
            if name not in folders:
                raise UnknownVersion(f"failed to load `{name[:128]}`: it is not in the repository")
            if name in self.models:
                self.models[name].refused.clear()
            self._load(name, folders[name])
            self._load_members(name, folders)
            self._plan_ensembles()
            state = self.models[name]
            if not state.versions:
                raise UnknownVersion(f"failed to load `{name}`: {next(iter(state.reasons.values()), 'it has no version')}", 400)

    async def unload(self, name: str, members: bool = False) -> None:
        """Unloads a model once its running requests have ended.

        Args:
            members: whether the members of an ensemble are unloaded too.

        Raises:
            UnknownVersion: there is no such model.
        """
        names = [name]
        if members and (ensemble := self.state(name).settings.ensemble) is not None:
            names += dict.fromkeys(step.model for step in ensemble.steps)
        states = [self.state(model) for model in names]

        def let_go() -> None:
            with self._loading:
                versions = [version for state in states for version in state.versions.values()]
                for state in states:
                    state.unloaded = True
                    state.reasons = dict.fromkeys({*state.versions, *state.reasons}, "unloaded")
                    state.versions = {}
                # Ensembles come first, so that they refuse requests that they could not finish.
                self._plan_ensembles()
                for version in versions:
                    self._close(version)

        await asyncio.get_running_loop().run_in_executor(self._loader, let_go)

    def _load(self, name: str, folder: Path) -> None:
        """Loads and unloads versions of a model, so that it has those that its settings name."""
        state = self.models.get(name) or ModelState(folder, ModelSettings())
        self.models = {**self.models, name: state}
        state.unloaded = False
        numbered = _numbered(folder)
        try:
            state.settings = read_model_settings(folder)
        except UserError as error:
            why = "; ".join(problem.what for problem in problems_of(error))
            state.reasons = {number: why for number in numbered or (1,) if number not in state.versions}
            self._say_once(state, f"{name}: {why}; its versions stay as they are")
            return
        if state.settings.ensemble is not None:
            # `_plan_ensembles` does the rest. Bundles that were served from this folder go.
            reasons = state.reasons
            self._let_go(state, {1: folder} if self._ensemble_of(state) is not None else {})
            # They stay until it is planned again, or each look would say them anew.
            state.reasons = {number: why for number, why in reasons.items() if number == 1}
            return
        versions = versions_to_serve(numbered, state.settings)
        for number in sorted(versions):
            self._load_version(state, name, number, versions[number])
        # After the new versions are ready.
        self._let_go(state, versions)
        for number in named_versions(state.settings):
            if number not in state.versions:
                self._say_once(state, f"{name}: config.yml names version {number}, which is not loaded")

    def _load_version(self, state: ModelState, name: str, number: int, path: Path) -> None:
        """Loads a version, unless the same files are already loaded or were refused. An error does not affect other versions."""
        old, bundle, batcher = state.versions.get(number), None, None
        try:
            stamp = _stamp(path)
            if (old is not None and old.stamp == stamp) or state.refused.get(number) == stamp:
                return
            state.refused[number] = stamp
            bundle = self.open_bundle(path, key=self.settings.key_file, say=self.say)
            batching = state.settings.batching or self.settings.batching
            batcher = Batcher(bundle, batching, self.metrics.batches(name, number))
            if self.settings.warm_up:
                batcher.warm_up(self.store, lambda progress: self.say(f"{name} version {number}: {progress} ..."))
        except Exception as error:
            if batcher is not None:
                batcher.close()
            if bundle is not None:
                bundle.close()
            why = _reason(error)
            if old is None:
                state.reasons = {**state.reasons, number: why}
            problem = f"{name} version {number} is not loaded: {why}{'; the one that was loaded stays' if old is not None else ''}"
            if isinstance(error, FailedElsewhere):
                # Some machines see a file of a shared file system later than others, so the next scan tries again.
                state.refused.pop(number, None)
                self._say_once(state, problem)
            else:
                self.say(problem)
            return
        state.refused.pop(number, None)
        state.versions = {**state.versions, number: LoadedVersion(name, number, path, bundle, batcher, stamp)}
        state.reasons = {other: why for other, why in state.reasons.items() if other != number}
        self.say(f"{name} version {number}: {', '.join(bundle.manifest.signatures)}")
        if old is not None:
            self._close(old)

    def _load_members(self, name: str, folders: Mapping[str, Path]) -> None:
        """Loads the members of an ensemble that are not loaded."""
        ensemble = self.models[name].settings.ensemble
        for member in {step.model for step in ensemble.steps} if ensemble is not None else set():
            if member in folders and (member not in self.models or self.models[member].unloaded):
                self._load(member, folders[member])
                self._load_members(member, folders)

    def _plan_ensembles(self) -> None:
        """Plans ensembles again whose members have changed."""
        ensembles = {name: state.settings.ensemble for name, state in self.models.items() if state.settings.ensemble is not None}
        for name in ensemble_order(ensembles):
            state, steps = self.models[name], ensembles[name].steps
            if state.unloaded:
                continue
            try:
                if _numbered(state.path):
                    raise BadInput("its folder has bundles, and config.yml an ensemble")
                if (circle := circle_of(name, ensembles)) is not None:
                    raise BadInput(f"a circle of ensembles: {circle}")
                planned = Ensemble(ensembles[name], self._member, self.metrics.batches(name, 1))
            # An error does not affect other ensembles.
            except Exception as error:
                why = _reason(error)
                if state.reasons != {1: why}:
                    self.say(f"{name} is not ready: {why}")
                state.versions, state.reasons = {}, {1: why}
                members = [self.models.get(step.model) for step in steps]
                state.idle = any(member is not None and (member.unloaded or member.idle) for member in members)
                continue
            old = self._ensemble_of(state)
            if old is None or not planned.plans_like(old):
                state.versions = {1: LoadedVersion(name, 1, state.path, planned, planned, None)}
                self.say(f"{name} version 1: an ensemble of {', '.join(dict.fromkeys(step.model for step in steps))}")
            state.reasons, state.idle = {}, False

    def _ensemble_of(self, state: ModelState) -> Ensemble | None:
        """Returns the ensemble of a model that is ready; None if there is none."""
        version = state.versions.get(1)
        return version.bundle if version is not None and isinstance(version.bundle, Ensemble) else None

    def _member(self, model: str, version: int | None) -> tuple[BundleManifest, Batcher | Ensemble]:
        """Returns the manifest and the queue of a member of an ensemble."""
        try:
            loaded = self.find(model, None if version is None else str(version))
        except UnknownVersion as error:
            raise MemberNotReady(error.message) from None
        return loaded.bundle.manifest, loaded.batcher

    def _let_go(self, state: ModelState, versions: Mapping[int, Path]) -> None:
        """Unloads all versions except these."""
        others = [version for number, version in state.versions.items() if number not in versions]
        state.versions = {number: version for number, version in state.versions.items() if number in versions}
        state.reasons = {number: why for number, why in state.reasons.items() if number in versions}
        for version in others:
            self._close(version)
            self.metrics.forget(version.model, version.version)

    def _say_once(self, state: ModelState, message: str) -> None:
        if message not in state.said:
            state.said.add(message)
            self.say(message)

    def _close(self, version: LoadedVersion) -> None:
        version.batcher.close()
        self.say(f"{version.model} version {version.version} is unloaded")
        version.bundle.close()
        gc.collect()
        # malloc keeps freed memory, half a megabyte for each version of a small model.
        trim()

    # ---------------------------------------------------------------- life

    def poll(self, seconds: float) -> None:
        """Scans the repository every `seconds`, in a separate thread."""

        def work() -> None:
            while not self._stop.wait(seconds):
                try:
                    self.look()
                except OSError as error:
                    self.say(f"the repository cannot be read: {error.strerror or error}")

        threading.Thread(target=work, name="looks at the repository", daemon=True).start()

    async def drain(self, seconds: float) -> None:
        """Waits until no request is running, for at most `seconds`."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not all(v.batcher.idle for m in self.models.values() for v in m.versions.values()):
            await asyncio.sleep(0.02)

    def close(self) -> None:
        """Ends all threads, each after its current batch."""
        self._stop.set()
        self._loader.shutdown(wait=False, cancel_futures=True)
        for state in self.models.values():
            for version in state.versions.values():
                version.batcher.close(drop=True)


def read_model_settings(folder: Path) -> ModelSettings:
    """Reads the settings in `config.yml` of a model. Returns the defaults if there is no such file.

    Raises:
        UserError: the file cannot be read, or has an unknown setting.
    """
    path = folder / CONFIG
    return read_settings(ModelSettings, yaml_layer(path)).value if path.is_file() else ModelSettings()


def versions_to_serve(numbered: Mapping[int, Path], settings: ModelSettings) -> dict[int, Path]:
    """Returns the versions to serve, including those that labels name."""
    match settings.versions:
        case "all":
            numbers = set(numbered)
        case "latest":
            numbers = set(sorted(numbered)[-settings.latest :])
        case _:
            numbers = set()
    numbers |= named_versions(settings)
    return {number: path for number, path in numbered.items() if number in numbers}


def named_versions(settings: ModelSettings) -> set[int]:
    """Returns the versions that `config.yml` names, by number or by label."""
    return {*settings.labels.values(), *(settings.versions if isinstance(settings.versions, tuple) else ())}


def check_repository(path: Path) -> None:
    """Checks that a repository contains a bundle.

    Raises:
        BadInput: there is no such folder, or no bundle in it.
    """
    if not path.is_dir():
        raise BadInput(f"no such folder: `{path}`", hint="a folder of bundles: REPOSITORY/NAME/1/")
    here = [path, *(child for child in path.iterdir() if child.is_dir())]
    if not any((folder / MANIFEST).is_file() or _numbered(folder) for folder in here):
        raise BadInput(f"{path} has no bundle", hint="`argosy export MODEL REPOSITORY/NAME/1` writes one")


def _reason(error: Exception) -> str:
    """Returns the reason why a version or an ensemble is not ready."""
    if isinstance(error, MemberNotReady):
        return error.message
    return error.what if isinstance(error, ArgosyError) else f"{type(error).__name__}: {complaint(error)}"


def _is_ensemble(folder: Path) -> bool:
    """Whether the config.yml of a folder has steps or cannot be read, so that the model is listed with the reason."""
    try:
        return read_model_settings(folder).ensemble is not None
    except UserError:
        return True


def _numbered(folder: Path) -> dict[int, Path]:
    """Returns the versions that have a manifest, by number. A version without one is still being copied."""
    if (folder / MANIFEST).is_file():
        return {1: folder}
    versions = {_number(child): child for child in folder.iterdir() if child.is_dir() and (child / MANIFEST).is_file()}
    return {number: path for number, path in versions.items() if number is not None}


def _number(folder: Path) -> int | None:
    name = folder.name
    return int(name) if name.isdecimal() and len(name) < 19 and str(int(name)) == name and int(name) > 0 else None


def _model_name(folder: Path) -> str:
    return folder.resolve().name.removesuffix(".bundle")


def _stamp(path: Path) -> Any:
    """Returns the times and sizes of all files of a folder, which change if a file is added, removed or changed."""
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return [(str(file), (status := file.stat()).st_mtime_ns, status.st_size, status.st_ino) for file in files]


def _listed(names: Any) -> str:
    return ", ".join(map(str, names)) or "none"
