"""`Bundle`: opens an exported directory, and runs its programs.

    bundle = Bundle.open("minilm.bundle")
    bundle.run({"text": ["a boat", "a ship"]})["embedding"]          # [2 D] float32

Every file is compared with its hash before anything is parsed. The programs are StableHLO that takes the weights as arguments. Neither
flax nor the source code of the model is imported, and nothing is unpickled. A program is compiled when inputs of its shape come for the
first time. This module knows nothing of models, whose bundles `export.model` writes.
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

    path: the folder of the bundle.
    manifest: the description of signatures, programs and weights.
    platform: the platform of this process: cpu, cuda, rocm or tpu.
    mesh: the devices that the programs run on together. None for one device, or if the bundle was opened with runs=False.
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
        """Verifies all files of a bundle and memory-maps its weights. Nothing is compiled yet.

        Args:
            path: the folder of the bundle.
            key: a file with the public key whose owner must have signed the bundle. With None, a signature is ignored.
            say: called with a warning in the last month in which jax guarantees to read these programs.
            expired: whether to try to read programs whose guarantee has ended.
            runs: whether programs will be run. The devices of the bundle must then exist.

        Raises:
            BadInput: there is no bundle.
            Damaged: a file differs from the manifest. The message names the file.
            Unsupported: the format of the bundle is not known, there is no program for this platform or number of devices, or the
                programs are too old for this version of jax.
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
        """Runs a signature on inputs of any supported size.

        Args:
            inputs: arrays or nested lists by name, or inputs of the steps before the program, such as texts.
            signature: the name of the signature. None stands for the default one.

        Returns:
            the outputs by name: numpy arrays, and lists of texts.

        Raises:
            BadInput: the bundle has no such signature or input, or a shape or type differs.
        """
        of = self.manifest.signature(signature)
        return self.run_arrays(checked_inputs(of, self.preprocessed(of, inputs)), signature)

    def run_arrays(self, arrays: Mapping[str, np.ndarray], signature: str | None = None) -> dict[str, Any]:
        """Runs a signature as `run` does, on inputs that `calls.checked_inputs` returned."""
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
        """Runs a program on inputs of its sizes. Returns the outputs on the devices."""
        call = self._program(signature, program)
        return self._run(call, _shapes(arrays), self._signature_weights(signature), self._on_devices(arrays))

    def load(self) -> None:
        """Reads the programs of this platform, and puts all weights on the devices. Later calls read no files of the bundle, except
        those of the tokenizer.

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
            sizes: the sizes of named axes to compile for, for each signature with open sizes. Programs of fixed sizes are compiled too.
            store: the store that compiled programs are read from and written to.
            say: called every second with a message about the remaining work.
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
        """Runs every program of fixed sizes once, and programs with open sizes on the example of the signature. Returns the number of
        runs."""
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
        """Returns the tokenizer in a folder of the bundle."""
        with self._lock:
            if folder not in self._tokenizers:
                self._tokenizers[folder] = bundled_tokenizer(self.path / folder)
            return self._tokenizers[folder]

    def weight(self, name: str) -> np.ndarray:
        """Returns a tensor as it is stored, as a read-only view of its file.

        Raises:
            Damaged: the file was changed in place after the bundle was opened.
        """
        file = self._weights[name]
        self._check_unaltered(file.path)
        return file.read(name)

    def _check_unaltered(self, path: Path) -> None:
        """Checks that a mapped file was not changed in place. A new file under the same name does not matter, because the mapping is of
        the old one."""
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
        """Releases the programs, and the weights on the devices."""
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
        """Runs the steps before the program. Returns the inputs of the program."""
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
        """Returns the weights of a signature on the devices, where they stay. Each of several devices gets its shard."""
        with self._lock:
            for name in signature.weights:
                if name not in self._arrays:
                    # Copied, because on a CPU the array could otherwise share the memory of the mapped file, which may be overwritten.
                    self._arrays[name] = on_devices(self.weight(name), self._place(name), copy=True)
            return {name: self._arrays[name] for name in signature.weights}

    def _place(self, name: str) -> NamedSharding | None:
        return None if self.mesh is None else sharding_of(self._splits[name], self.mesh)

    def _on_devices(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Puts inputs on the devices. Each is replicated over the mesh, whose devices may belong to several processes."""
        if self.mesh is None:
            return dict(arrays)
        everywhere = sharding_of([], self.mesh)
        return {name: on_devices(a, everywhere) for name, a in arrays.items()}

    def _program(self, signature: BundleSignature, program: BundleProgram) -> Program:
        """Returns a program as a function (weights, inputs) -> outputs."""
        with self._lock:
            if program.file not in self._programs:
                exported = self.exported(program)
                check_program(exported, program, signature, self)
                made_of = f"{self.manifest.files[program.file].sha256} {self.platform}"
                self._programs[program.file] = Program(exported.call, made_of=made_of, implied=1)
            return self._programs[program.file]

    def exported(self, program: BundleProgram) -> export.Exported:
        """Deserializes a program.

        Raises:
            Damaged: the file was altered after the bundle was opened.
            Unsupported: this version of jax cannot read the program.
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
    """Returns the shapes of the inputs, which distinguish the compilations of a program."""
    return tuple(a.shape for a in arrays.values())


def running_platform() -> str:
    """Returns the platform of this process, by the names of `jax.export`."""
    backend = jax.default_backend()
    if backend != "gpu":
        return backend
    return "rocm" if "rocm" in jax.devices()[0].client.platform_version.lower() else "cuda"


def check_window(manifest: BundleManifest, folder: Path, say: Callable[[str], None], expired: bool = False) -> None:
    """Checks that this version of jax guarantees to read the programs. The version that wrote them can always read them.

    Args:
        say: called with a warning if the guarantee ends soon.
        expired: whether programs whose guarantee has ended are accepted.

    Raises:
        Unsupported: the guarantee has ended and `expired` is false, or this version is too old.
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
    """Checks that this version of jax is new enough for the programs, because XLA's own error does not mention versions.

    Raises:
        Unsupported: this version is too old.
    """
    from jaxlib.mlir.dialects import stablehlo

    texts = manifest.versions.get("stablehlo", ""), stablehlo.get_current_version()
    programs_version, readable_version = map(_numbers, texts)
    if programs_version > readable_version:
        versions = f"{manifest.versions['stablehlo']}, and jax {jax.__version__} reads {stablehlo.get_current_version()} at most"
        problem = f"its programs are StableHLO {versions}"
        raise Unsupported(problem, where=str(folder), hint=f"jax {manifest.versions.get('jax')}, which wrote them, or a newer one")


def _numbers(text: str) -> tuple[int, ...]:
    """Parses a version into numbers; empty if it is unknown."""
    return tuple(map(int, text.split("."))) if re.fullmatch(r"\d{1,9}(\.\d{1,9}){0,3}", text) else ()


def check_program(exported: export.Exported, program: BundleProgram, signature: BundleSignature, bundle: Bundle) -> None:
    """Checks that the inputs and outputs of a program are those of the manifest.

    Raises:
        Damaged: the inputs or outputs differ.
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
