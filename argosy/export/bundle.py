"""`Bundle`: opens an exported directory, and runs its programs.

    bundle = Bundle.open("minilm.bundle")
    bundle.run({"text": ["a boat", "a ship"]})["embedding"]          # [2 D] float32

Every byte is compared with its hash before any is parsed. What runs is StableHLO with the weights as arguments: neither flax nor the
model's source is imported, and nothing is unpickled. A program is compiled when its shape is first met. This module knows nothing of
models; `export.model` writes their bundles.
"""

import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from jax import export
from jax.sharding import Mesh, NamedSharding

from argosy.core.counts import plural
from argosy.core.errors import BadInput, Damaged, Unsupported, complaint
from argosy.core.formats.safetensors import SafeTensors
from argosy.core.progress import Say
from argosy.data.tokenizers import Tokenizer
from argosy.export.calls import (
    checked_inputs,
    filled_inputs,
    named_sizes,
    padded_inputs,
    select_program,
    unpadded_outputs,
)
from argosy.export.manifest import BundleManifest, BundleProgram, BundleSignature, dtype_of_name
from argosy.export.mesh import device_count, device_mesh, sharding_of
from argosy.export.steps import (
    DecodeImageStep,
    TokenizePromptStep,
    TokenizeStep,
    bundled_tokenizer,
    decoded_images,
    step_result,
    tokenize_inputs,
    tokenized_prompts,
)
from argosy.export.verify import WARN, days_left, open_bundle_weights, verify_bundle
from argosy.ops.programs.programs import Program, Programs
from argosy.ops.programs.store import ProgramStore
from argosy.parallel.place import on_devices

RENEW = "`argosy bundle refresh BUNDLE` renews its programs from the bundle itself; the weights stay as they are"


@dataclass
class Bundle:
    """An open bundle.

    path: its folder.
    manifest: its description.
    platform: the platform that its programs run on: cpu, cuda, rocm or tpu.
    mesh: the devices that its programs run on together; None: one device, or it was opened without being run.
    """

    path: Path
    manifest: BundleManifest
    platform: str
    mesh: Mesh | None
    _weights: Mapping[str, SafeTensors] = field(repr=False)
    _stamps: Mapping[Path, os.stat_result] = field(repr=False)
    _arrays: dict[str, jax.Array] = field(default_factory=dict, init=False, repr=False)
    _programs: dict[str, Program] = field(default_factory=dict, init=False, repr=False)
    _run: Programs = field(default_factory=Programs, init=False, repr=False)
    _lock: Any = field(default_factory=threading.RLock, init=False, repr=False)

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        key: str | Path | None = None,
        say: Callable[[str], None] = lambda _: None,
        expired: bool = False,
        runs: bool = True,
    ) -> Self:
        """Verifies a bundle completely and maps its weights. Nothing is compiled yet.

        Args:
            key: a file with the public key whose owner must have signed it.
            say: called with a warning in the last month in which jax guarantees to read these programs.
            expired: whether to try to read programs whose guarantee has ended.
            runs: whether its programs will be run, for which its devices must be there.

        Raises:
            BadInput: there is no bundle.
            Damaged: a file differs from the manifest; the message names it.
            Unsupported: another format, no program for this platform or this number of devices, or programs that are too old for this
                jax.
        """
        folder = Path(path)
        stamps = {file: file.stat() for file in (folder / "weights").glob("*")}
        manifest = verify_bundle(folder, key)
        check_window(manifest, folder, say, expired)
        platform = running_platform()
        for name, signature in manifest.signatures.items():
            if platform not in signature.platforms:
                problem = f"signature `{name}` has programs for {', '.join(signature.platforms)}, and this process runs on {platform}"
                hint = f"export the model again with platforms={','.join([*signature.platforms, platform])}"
                raise Unsupported(problem, where=str(folder), hint=hint)
        mesh = device_mesh(manifest.mesh, folder) if runs else None
        opened = [(weights, open_bundle_weights(folder, weights)) for weights in manifest.weights]
        return cls(folder, manifest, platform, mesh, {name: file for weights, file in opened for name in weights.tensors}, stamps)

    def run(self, inputs: Mapping[str, Any], signature: str | None = None) -> dict[str, Any]:
        """Calls a signature.

        Args:
            inputs: arrays or nested lists by name; or inputs of the steps before the program, such as texts.
            signature: its name; None: the default.

        Returns:
            Outputs by name: numpy arrays, and lists of texts.

        Raises:
            BadInput: the bundle has no such signature or input, or a shape or type differs.
        """
        of = self.manifest.signature(signature)
        return self.run_arrays(checked_inputs(of, self.preprocessed(of, inputs)), signature)

    def run_arrays(self, arrays: Mapping[str, np.ndarray], signature: str | None = None) -> dict[str, Any]:
        """Calls a signature with inputs from `calls.checked_inputs`; otherwise like `run`."""
        of = self.manifest.signature(signature)
        sizes = named_sizes(of, arrays)
        program = select_program(of, self.platform, sizes)
        outputs = self.computed(of, program, padded_inputs(of, arrays, program))
        results: dict[str, Any] = unpadded_outputs(of, {name: np.asarray(value) for name, value in outputs.items()}, sizes)
        for step in of.postprocess:
            results[step.output] = step_result(step, results, self.tokenizer)
        return results

    def computed(
        self, signature: BundleSignature, program: BundleProgram, arrays: Mapping[str, np.ndarray]
    ) -> dict[str, jax.Array]:
        """The outputs of a program on the devices, for inputs of its sizes."""
        call = self._program(signature, program)
        return self._run(call, _shapes(arrays), self._signature_weights(signature), self._on_devices(arrays))

    def load(self) -> None:
        """Reads the programs of this platform, and puts all weights on the devices: from here on a call reads no file of the bundle but
        the tokenizer.

        Raises:
            Damaged: a file was altered after the bundle was opened.
            Unsupported: this version of jax cannot read a program.
        """
        for of in self.manifest.signatures.values():
            for program in [program for program in of.programs if self.platform in program.platforms]:
                self._program(of, program)
            self._signature_weights(of)

    def compile(
        self, sizes: Mapping[str, Iterable[Mapping[str, int]]], store: ProgramStore | None = None, say: Say | None = None
    ) -> int:
        """Compiles programs before the first call needs them. Returns the number of programs.

        Args:
            sizes: for each signature with open sizes, the sizes of named axes to compile for. Programs of fixed sizes are compiled too.
            store: where compiled programs are read from and written to.
            say: called every second with the remaining work.
        """
        programs = {}
        for name, every in sizes.items():
            of = self.manifest.signature(name)
            for program in [program for program in of.programs if self.platform in program.platforms]:
                for some in every:
                    fixed = tuple(sorted((dict(some) | program.shapes).items()))
                    programs[program.file, fixed] = of, program
        with self._run.ahead(store, say):
            for (_, fixed), (of, program) in programs.items():
                arrays = filled_inputs(of, dict(fixed))
                self._run(self._program(of, program), _shapes(arrays), self._signature_weights(of), self._on_devices(arrays))
        return len(programs)

    def warm_up(self, signature: str | None = None) -> int:
        """Calls every program of fixed sizes once, and signatures with open sizes with their example. Returns the number of calls."""
        of = self.manifest.signature(signature)
        count = 0
        for program in [program for program in of.programs if self.platform in program.platforms]:
            if program.shapes:
                self.run_arrays(filled_inputs(of, program.shapes), signature)
            elif of.example:
                self.run(of.example, signature)
            else:
                continue
            count += 1
        return count

    def tokenizer(self, folder: str = "tokenizer") -> Tokenizer:
        """The tokenizer in the bundle."""
        with self._lock:
            if folder not in self._tokenizers:
                self._tokenizers[folder] = bundled_tokenizer(self.path / folder)
            return self._tokenizers[folder]

    def weight(self, name: str) -> np.ndarray:
        """A tensor as it is stored: a read-only view of its file.

        Raises:
            Damaged: the file was altered in its place after the bundle was opened.
        """
        file = self._weights[name]
        self._check_unaltered(file.path)
        return file.read(name)

    def _check_unaltered(self, path: Path) -> None:
        """Checks a mapped file. Another file that took its name does not matter: the mapping is of the one that was opened."""
        try:
            before, now = self._stamps[path], path.stat()
        except FileNotFoundError:
            return
        if before.st_ino != now.st_ino or (before.st_mtime_ns, before.st_size) == (now.st_mtime_ns, now.st_size):
            return
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != path.stem:
            raise Damaged(f"{path.parent.name}/{path.name} was altered after the bundle was opened", where=str(self.path))

    def close(self) -> None:
        """Releases its programs, and its weights on the device."""
        with self._lock:
            self._programs.clear()
            self._arrays.clear()
            self._run = Programs()

    # ---------------------------------------------------------------- programs

    @cached_property
    def _tokenizers(self) -> dict[str, Tokenizer]:
        return {}

    @cached_property
    def _splits(self) -> dict[str, list[str | None]]:
        return self.manifest.splits()

    def preprocessed(self, signature: BundleSignature, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs after the steps before the program have run."""
        prepared = dict(inputs)
        for step in signature.preprocess:
            if step.input not in prepared:
                continue
            if twice := [name for name in step.results if name in prepared]:
                reason = "pixels are made of the file" if isinstance(step, DecodeImageStep) else "ids are made of the text"
                raise BadInput(f"`{step.input}` and `{twice[0]}`", hint=f"one of them: {reason}")
            if isinstance(step, DecodeImageStep):
                dtype = next(spec.dtype for spec in signature.inputs if spec.name == step.image)
                prepared[step.image] = decoded_images(step, prepared.pop(step.input), dtype_of_name(dtype))
            elif isinstance(step, TokenizePromptStep):
                prepared |= tokenized_prompts(step, self.tokenizer, prepared.pop(step.input))
            else:
                texts = [prepared.pop(name, None) for name in step.texts]
                prepared |= self._tokenized(step, signature, texts)
        return prepared

    def _tokenized(self, step: TokenizeStep, signature: BundleSignature, texts: list[Any]) -> dict[str, Any]:
        shape = next(i.shape for i in signature.inputs if i.name == step.tokens)
        longest = signature.limits.get(str(shape[1]), shape[1] if isinstance(shape[1], int) else None)
        return tokenize_inputs(step, self.tokenizer(step.folder), texts[0], longest, *texts[1:])

    def _signature_weights(self, signature: BundleSignature) -> dict[str, jax.Array]:
        """The weights of a signature on the device, where they stay; of several devices, each gets its share."""
        with self._lock:
            for name in signature.weights:
                if name not in self._arrays:
                    # A copy: on a CPU an array could otherwise share the memory of the mapped file, which may be overwritten.
                    self._arrays[name] = on_devices(self.weight(name), self._place(name), copy=True)
            return {name: self._arrays[name] for name in signature.weights}

    def _place(self, name: str) -> NamedSharding | None:
        return None if self.mesh is None else sharding_of(self._splits[name], self.mesh)

    def _on_devices(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Inputs as a program takes them: all of each on every device of a mesh, which may be those of several processes."""
        if self.mesh is None:
            return dict(arrays)
        everywhere = sharding_of([], self.mesh)
        return {name: on_devices(a, everywhere) for name, a in arrays.items()}

    def _program(self, signature: BundleSignature, program: BundleProgram) -> Program:
        """The program as a function (weights, inputs) -> outputs."""
        with self._lock:
            if program.file not in self._programs:
                exported = self.exported(program)
                check_program(exported, program, signature, self)
                made_of = f"{self.manifest.files[program.file].sha256} {self.platform}"
                self._programs[program.file] = Program(exported.call, made_of=made_of, implied=1)
            return self._programs[program.file]

    def exported(self, program: BundleProgram) -> export.Exported:
        """A program, deserialized.

        Raises:
            Damaged: the file was altered after the bundle was opened.
            Unsupported: this version of jax cannot read it.
        """
        data = (self.path / program.file).read_bytes()
        if hashlib.sha256(data).hexdigest() != self.manifest.files[program.file].sha256:
            raise Damaged(f"{program.file} was altered after the bundle was opened", where=str(self.path))
        try:
            return export.deserialize(bytearray(data))
        except Exception as error:
            versions = self.manifest.versions
            problem = f"{program.file} cannot be read by jax {jax.__version__}: {complaint(error)}"
            hint = f"it was written by jax {versions.get('jax')}; with that version, {RENEW}"
            raise Unsupported(problem, where=str(self.path), hint=hint) from error


def _shapes(arrays: Mapping[str, np.ndarray]) -> tuple[Any, ...]:
    """What tells the compilations of a program apart."""
    return tuple(a.shape for a in arrays.values())


def running_platform() -> str:
    """The platform of this process, by the names of `jax.export`."""
    backend = jax.default_backend()
    if backend != "gpu":
        return backend
    return "rocm" if "rocm" in jax.devices()[0].client.platform_version.lower() else "cuda"


def check_window(manifest: BundleManifest, folder: Path, say: Callable[[str], None], expired: bool = False) -> None:
    """Checks that this version of jax promises to read the programs. The version that wrote them can always read them.

    Raises:
        Unsupported: the promise has ended and `expired` is false, or this version is too old.
    """
    check_stablehlo(manifest, folder)
    days, writer = days_left(manifest), manifest.versions.get("jax", "")
    if days > WARN.days or jax.__version__ == writer:
        return
    if days >= 0:
        until = f"{manifest.readable_until}, in {plural(days, 'day')}"
        say(f"{folder}: newer versions of jax may not read its programs after {until}; {RENEW}")
    elif not expired:
        problem = f"its programs are from jax {writer}; newer versions promised to read them until {manifest.readable_until}"
        raise Unsupported(problem, where=str(folder), hint=f"with jax {writer}, or one of the six months after it, {RENEW}")


def check_stablehlo(manifest: BundleManifest, folder: Path) -> None:
    """Checks that this version of jax is new enough for the programs, since XLA's own error does not mention versions.

    Raises:
        Unsupported: it is too old.
    """
    from jaxlib.mlir.dialects import stablehlo

    texts = manifest.versions.get("stablehlo", ""), stablehlo.get_current_version()
    programs_version, readable_version = map(_numbers, texts)
    if programs_version > readable_version:
        versions = f"{manifest.versions['stablehlo']}, and jax {jax.__version__} reads {stablehlo.get_current_version()} at most"
        problem = f"its programs are StableHLO {versions}"
        raise Unsupported(problem, where=str(folder), hint=f"jax {manifest.versions.get('jax')}, which wrote them, or a newer one")


def _numbers(text: str) -> tuple[int, ...]:
    """A version as numbers; none where it is not known."""
    return tuple(map(int, text.split("."))) if re.fullmatch(r"\d{1,9}(\.\d{1,9}){0,3}", text) else ()


def check_program(exported: export.Exported, program: BundleProgram, signature: BundleSignature, bundle: Bundle) -> None:
    """Checks that the inputs and outputs of a program are those of the manifest.

    Raises:
        Damaged: they differ.
    """
    layouts = {name: layout for file in bundle.manifest.weights for name, layout in file.tensors.items()}
    weights = {name: (tuple(map(str, layouts[name].shape)), layouts[name].dtype) for name in signature.weights}

    def described(tensors: Any) -> dict[str, Any]:
        return {t.name: (tuple(str(program.shapes.get(str(n), n)) for n in t.shape), t.dtype) for t in tensors}

    def avals(tree: Any, leaves: Any) -> Any:
        shapes = jax.tree.unflatten(tree, [(tuple(map(str, aval.shape)), str(aval.dtype)) for aval in leaves])
        return shapes

    try:
        (read_weights, read_inputs), keywords = avals(exported.in_tree, exported.in_avals)
        outputs = avals(exported.out_tree, exported.out_avals)
        same = not keywords and read_weights == weights and read_inputs == described(signature.inputs)
        same &= outputs == described(signature.outputs) and set(program.platforms) <= set(exported.platforms)
        same &= exported.nr_devices == device_count(bundle.manifest.mesh)
    except (TypeError, ValueError, AttributeError):
        same = False
    if not same:
        raise Damaged(f"{program.file} does not have the shapes and types of its signature", where=str(bundle.path))
