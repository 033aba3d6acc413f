"""A repository of models: `REPOSITORY/NAME/VERSION/`, each version a bundle, its number a whole one above 0.

    vision/1/manifest.json ...      vision/2/manifest.json ...      vision/config.yml (may be absent)
    embed.bundle/manifest.json ...  a bundle without a number is version 1 of a model of its folder's name

A version is loaded once its manifest is complete and every file has its hash: one that is being copied is not touched. A new version
answers before the old one is let go, which then ends what it has. Loading takes one version at a time, in a thread of its own; the
event loop reads `models` and `versions` meanwhile, so these are replaced, never changed.
"""

import asyncio
import gc
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from argosy.core.errors import ArgosyError, BadInput, complaint
from argosy.core.progress import Say
from argosy.core.settings import read_settings, yaml_layer
from argosy.export.bundle import Bundle
from argosy.export.manifest import MANIFEST
from argosy.predict.batching import Batcher
from argosy.predict.metrics import PredictMetrics
from argosy.predict.settings import ModelSettings, PredictSettings

CONFIG = "config.yml"


@dataclass(eq=False)
class LoadedVersion:
    """A version that answers.

    stamp: tells its manifest from a later one at the same place.
    """

    model: str
    version: int
    path: Path
    bundle: Bundle
    batcher: Batcher
    stamp: Any
    loaded: float = field(default_factory=time.time)


@dataclass
class ModelState:
    """What is known of a model.

    reasons: why a version is not loaded.
    refused: the stamps of versions that could not be loaded, which are tried again once a file changes.
    unloaded: whether a request unloaded it: looks at the repository leave it so.
    said: sentences that need not be said again.
    """

    path: Path
    settings: ModelSettings
    versions: Mapping[int, LoadedVersion] = field(default_factory=dict)
    reasons: Mapping[int, str] = field(default_factory=dict)
    refused: dict[int, Any] = field(default_factory=dict)
    unloaded: bool = False
    said: set[str] = field(default_factory=set)


class UnknownVersion(Exception):
    """There is no such model or version, or it is not ready. status: of HTTP."""

    def __init__(self, message: str, status: int = 404):
        super().__init__(message)
        self.message, self.status = message, status


class Repository:
    """The models of a folder, and those that answer."""

    def __init__(self, path: Path, settings: PredictSettings, metrics: PredictMetrics, say: Say):
        self.path, self.settings, self.metrics, self.say = path, settings, metrics, say
        self.models: Mapping[str, ModelState] = {}
        self._loading = threading.Lock()
        self._loader = ThreadPoolExecutor(1, "loads models")
        self._stop = threading.Event()

    # ---------------------------------------------------------------- what is there

    def folders(self) -> dict[str, Path]:
        """The folder of each model, by name."""
        if (self.path / MANIFEST).is_file():
            return {_model_name(self.path): self.path}
        found = {}
        for folder in sorted(self.path.iterdir()):
            if folder.is_dir() and not folder.name.startswith("."):
                if (folder / MANIFEST).is_file():
                    found[_model_name(folder)] = folder
                elif any(_number(child) for child in folder.iterdir() if child.is_dir()):
                    found[folder.name] = folder
        return found

    def state(self, name: str) -> ModelState:
        """Raises: UnknownVersion: there is no such model."""
        if (state := self.models.get(name)) is None:
            raise UnknownVersion(f"unknown model `{name[:128]}`; there are {', '.join(self.models) or 'none'}")
        return state

    def find(self, name: str, version: str | None = None, label: str | None = None) -> LoadedVersion:
        """The version that answers; the newest where none is named.

        Raises:
            UnknownVersion: there is no such one, or it is not ready.
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
        """Loads what is new, loads again what changed, and lets go what is gone."""
        with self._loading:
            folders = self.folders()
            gone = [state for name, state in self.models.items() if name not in folders]
            self.models = {name: state for name, state in self.models.items() if name in folders}
            for state in gone:
                self._let_go(state, {})
            for name, folder in folders.items():
                state = self.models.get(name)
                if state is not None and state.unloaded:
                    continue
                self._load(name, folder)

    async def load(self, name: str) -> None:
        """Loads a model, or loads it again where files changed.

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
            state = self.models[name]
            if not state.versions:
                raise UnknownVersion(f"failed to load `{name}`: {next(iter(state.reasons.values()), 'it has no version')}", 400)

    async def unload(self, name: str) -> None:
        """Lets a model go once what it computes has ended.

        Raises:
            UnknownVersion: there is no such model.
        """
        state = self.state(name)

        def let_go() -> None:
            with self._loading:
                state.unloaded = True
                versions, state.versions = state.versions, {}
                state.reasons = dict.fromkeys(versions, "unloaded")
                for version in versions.values():
                    self._close(version)

        await asyncio.get_running_loop().run_in_executor(self._loader, let_go)

    def _load(self, name: str, folder: Path) -> None:
        """Brings a model to the versions that its settings name."""
        state = self.models.get(name) or ModelState(folder, ModelSettings())
        self.models = {**self.models, name: state}
        state.unloaded = False
        numbered = _numbered(folder)
        try:
            state.settings = read_model_settings(folder)
        except ArgosyError as error:
            state.reasons = {number: error.what for number in numbered if number not in state.versions}
            self._say_once(state, f"{name}: {error.what}; its versions stay as they are")
            return
        wanted = chosen_versions(numbered, state.settings)
        for number in sorted(wanted):
            self._load_version(state, name, number, wanted[number])
        # After the new ones answer.
        self._let_go(state, wanted)
        for number in named_versions(state.settings):
            if number not in state.versions:
                self._say_once(state, f"{name}: config.yml names version {number}, which is not loaded")

    def _load_version(self, state: ModelState, name: str, number: int, path: Path) -> None:
        """Loads a version unless it is loaded, or was refused, as it is. Whatever is wrong with it disturbs no other."""
        old, batcher = state.versions.get(number), None
        try:
            stamp = _stamp(path)
            if (old is not None and old.stamp == stamp) or state.refused.get(number) == stamp:
                return
            state.refused[number] = stamp
            bundle = Bundle.open(path, key=self.settings.key_file, say=self.say)
            batching = state.settings.batching or self.settings.batching
            batcher = Batcher(bundle, batching, self.metrics.batches(name, number))
            if self.settings.warm_up:
                batcher.warm_up()
        except Exception as error:
            if batcher is not None:
                batcher.close()
            why = error.what if isinstance(error, ArgosyError) else f"{type(error).__name__}: {complaint(error)}"
            if old is None:
                state.reasons = {**state.reasons, number: why}
            kept = "; the one that was loaded stays" if old is not None else ""
            self.say(f"{name} version {number} is not loaded: {why}{kept}")
            return
        state.refused.pop(number, None)
        state.versions = {**state.versions, number: LoadedVersion(name, number, path, bundle, batcher, stamp)}
        state.reasons = {other: why for other, why in state.reasons.items() if other != number}
        self.say(f"{name} version {number}: {', '.join(bundle.manifest.signatures)}")
        if old is not None:
            self._close(old)

    def _let_go(self, state: ModelState, wanted: Mapping[int, Path]) -> None:
        """Lets go all versions but these."""
        gone = [version for number, version in state.versions.items() if number not in wanted]
        state.versions = {number: version for number, version in state.versions.items() if number in wanted}
        state.reasons = {number: why for number, why in state.reasons.items() if number in wanted}
        for version in gone:
            self._close(version)

    def _say_once(self, state: ModelState, what: str) -> None:
        if what not in state.said:
            state.said.add(what)
            self.say(what)

    def _close(self, version: LoadedVersion) -> None:
        version.batcher.close()
        self.say(f"{version.model} version {version.version} is unloaded")
        version.bundle.close()
        gc.collect()

    # ---------------------------------------------------------------- life

    def poll(self, seconds: float) -> None:
        """Looks again and again, in a thread of its own."""

        def work() -> None:
            while not self._stop.wait(seconds):
                try:
                    self.look()
                except OSError as error:
                    self.say(f"the repository cannot be read: {error.strerror or error}")

        threading.Thread(target=work, name="looks at the repository", daemon=True).start()

    async def drain(self, seconds: float) -> None:
        """Waits until nothing is computed, at most so long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not all(v.batcher.idle for m in self.models.values() for v in m.versions.values()):
            await asyncio.sleep(0.02)

    def close(self) -> None:
        """Ends all threads, each after the batch that it computes."""
        self._stop.set()
        self._loader.shutdown(wait=False, cancel_futures=True)
        for state in self.models.values():
            for version in state.versions.values():
                version.batcher.close(drop=True)


def read_model_settings(folder: Path) -> ModelSettings:
    """`config.yml` of a model; the defaults where there is none.

    Raises:
        ArgosyError: it cannot be read, or has a setting that there is not.
    """
    path = folder / CONFIG
    return read_settings(ModelSettings, yaml_layer(path)).value if path.is_file() else ModelSettings()


def chosen_versions(numbered: Mapping[int, Path], settings: ModelSettings) -> dict[int, Path]:
    """The versions that are to be served; those that labels name too."""
    match settings.versions:
        case "all":
            wanted = set(numbered)
        case "latest":
            wanted = set(sorted(numbered)[-settings.latest :])
        case _:
            wanted = set()
    wanted |= named_versions(settings)
    return {number: path for number, path in numbered.items() if number in wanted}


def named_versions(settings: ModelSettings) -> set[int]:
    """The versions that `config.yml` names, by number or by label."""
    return {*settings.labels.values(), *(settings.versions if isinstance(settings.versions, tuple) else ())}


def check_repository(path: Path) -> None:
    """Raises: BadInput: there is no such folder, or no bundle in it."""
    if not path.is_dir():
        raise BadInput(f"no such folder: `{path}`", hint="a folder of bundles: REPOSITORY/NAME/1/")
    here = [path, *(child for child in path.iterdir() if child.is_dir())]
    if not any((one / MANIFEST).is_file() or _numbered(one) for one in here):
        raise BadInput(f"{path} has no bundle", hint="`argosy export MODEL REPOSITORY/NAME/1` writes one")


def _numbered(folder: Path) -> dict[int, Path]:
    """Versions that have a manifest. Without one, a version is still being copied."""
    if (folder / MANIFEST).is_file():
        return {1: folder}
    found = {_number(child): child for child in folder.iterdir() if child.is_dir() and (child / MANIFEST).is_file()}
    return {number: path for number, path in found.items() if number is not None}


def _number(folder: Path) -> int | None:
    name = folder.name
    return int(name) if name.isdecimal() and len(name) < 19 and str(int(name)) == name and int(name) > 0 else None


def _model_name(folder: Path) -> str:
    return folder.resolve().name.removesuffix(".bundle")


def _stamp(path: Path) -> Any:
    """Tells whether a file was added, removed or changed."""
    files = sorted(one for one in path.rglob("*") if one.is_file())
    return [(str(one), (status := one.stat()).st_mtime_ns, status.st_size, status.st_ino) for one in files]


def _listed(found: Any) -> str:
    return ", ".join(map(str, found)) or "none"
