"""A store of compiled programs on disk, so that a second start of a server neither traces nor compiles.

    store = open_store(folder)              # None if the folder cannot be used safely
    store.write(key, program)
    store.read(key)                         # None if there is no such entry, or it is damaged

An entry is named by the fingerprint of its program (`ops.programs.fingerprint`), and begins with the hash of its name and content. An
entry is first written under another name and then renamed, so that concurrent starts never see half an entry. If all entries together
exceed a limit, those that have not been used for longest are removed.

Entries are machine code and pickles. Reading an entry can run code, as with JAX's compilation cache. The folder must therefore belong
to the user, and others must not be allowed to write to it. The hash detects damage, not forgery.
"""

import contextlib
import hashlib
import os
import pickle
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from argosy.ops.programs.fingerprint import NoFingerprint, environment_fingerprint

MAGIC = b"argosy program 1\n"
ENDING = ".program"
# The most bytes of all entries. For scale, an engine of SmolLM2-135M has 57 programs of 6 MB together.
MOST_BYTES = 1 << 30


class StoredProgram(NamedTuple):
    """A program that was read from disk.

    in_tree, out_tree: the pytree structures of arguments and of results.
    inputs, outputs: the (shape, dtype) of the leaves of arguments and of results.
    binary: the executable, from JAX's `serialize`.
    """

    in_tree: Any
    inputs: tuple[Any, ...]
    out_tree: Any
    outputs: tuple[Any, ...]
    binary: bytes

    def takes(self, arguments: tuple[Any, ...]) -> bool:
        """Whether the program was compiled for arguments with this structure, and these shapes and dtypes."""
        return self.in_tree == jax.tree.structure((arguments, {})) and self.inputs == array_signature(arguments)

    @property
    def described(self) -> Any:
        """Descriptions of the program's results."""
        return jax.tree.unflatten(self.out_tree, [jax.ShapeDtypeStruct(*about) for about in self.outputs])

    def load(self, devices: list[Any]) -> Any:
        """Loads the executable on these devices, for which it was compiled.

        Raises:
            Exception: any kind of error, if the binary is not valid for the devices.
        """
        return deserialize_and_load(self.binary, self.in_tree, self.out_tree, devices[0].client, devices)


class ProgramStore:
    """The compiled programs on disk for one environment. Programs share an environment if the source code, the packages and the
    devices are the same."""

    def __init__(self, folder: Path, environment: str):
        self.folder, self.environment = folder, environment

    def path(self, key: str) -> Path:
        return self.folder / f"{hashlib.sha256(f'{self.environment} {key}'.encode()).hexdigest()}{ENDING}"

    def read(self, key: str) -> StoredProgram | None:
        """Reads the program of this key. None: there is none, or it was damaged and has been removed."""
        path = self.path(key)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        program = _unpacked(path.name, content)
        with contextlib.suppress(OSError):
            path.unlink() if program is None else os.utime(path)
        return program

    def write(self, key: str, program: Any) -> bool:
        """Writes a program, which must have been compiled inside of `without_compilation_cache`.

        Returns whether the program could be written. Programs that call back into Python cannot.
        """
        try:
            binary, in_tree, out_tree = serialize(program)
            body = pickle.dumps(tuple(StoredProgram(in_tree, array_signature(program.args_info), out_tree,
            array_signature(program.out_info), binary)))
        except Exception:
            # JAX and XLA raise many kinds of errors for programs that they cannot serialize. The program itself still works.
            return False
        path = self.path(key)
        with contextlib.suppress(OSError), tempfile.NamedTemporaryFile(dir=self.folder, suffix=".part", delete=False) as file:
            try:
                file.write(_packed(path.name, body))
                file.close()
                os.replace(file.name, path)
                return True
            finally:
                Path(file.name).unlink(missing_ok=True)
        return False

    def tidy(self, most: int = MOST_BYTES) -> None:
        """Removes the least recently used entries until the others have at most `most` bytes."""
        entries = []
        with contextlib.suppress(OSError):
            for path in self.folder.iterdir():
                with contextlib.suppress(OSError):
                    about = path.stat()
                    entries.append((about.st_mtime, about.st_size, path))
        remaining = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if remaining <= most:
                return
            with contextlib.suppress(OSError):
                path.unlink()
            remaining -= size


def array_signature(tree: Any) -> tuple[Any, ...]:
    """Returns the (shape, dtype) of each leaf of a pytree."""
    return tuple((a.shape, a.dtype) for a in jax.tree.leaves(tree))


def _packed(name: str, body: bytes) -> bytes:
    return MAGIC + hashlib.sha256(name.encode() + body).digest() + body


def _unpacked(name: str, content: bytes) -> StoredProgram | None:
    start = len(MAGIC) + hashlib.sha256().digest_size
    if content[:start] != _packed(name, content[start:])[:start]:
        return None
    try:
        return StoredProgram(*pickle.loads(content[start:]))
    except Exception:
        # The hash is right, so a class of argosy or of JAX must have changed under the same version.
        return None


# Compiler options that equal the default. With them, a compilation does not return a program that this process already has.
ANEW = {"xla_embed_ir_in_executable": False}
_compiling: list[bool] = []
_lock = threading.Lock()


@contextlib.contextmanager
def without_compilation_cache() -> Iterator[None]:
    """A context in which programs that are compiled with the options `ANEW`, in any thread, do not come from JAX's compilation cache.

    If XLA:CPU serializes a program that it has deserialized, some functions are lost, and calling the result fails.
    """
    with _lock:
        # The first caller saves jax's settings, and the last one restores them.
        _compiling.append(_caches())
        jax.config.update("jax_enable_compilation_cache", False)
        reset_cache()
    try:
        yield
    finally:
        with _lock:
            before = _compiling.pop()
            jax.config.update("jax_enable_compilation_cache", before)
            reset_cache()


def _caches() -> bool:
    return jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]


def open_store(
    folder: Path | None, warn: Callable[[str], None] = lambda _: None, *, sources: bool = True
) -> ProgramStore | None:
    """Opens the store in a folder, which is created if it does not exist.

    Returns None if the folder cannot be written, or if others own it or may write to it. Also returns None if JAX's compilation cache
    is turned off (JAX_ENABLE_COMPILATION_CACHE=false), or if there are several processes.

    Args:
        folder: None: there is no store.
        warn: is called with a sentence if the folder cannot be written, or if others may write to it.
        sources: whether programs depend on the code of argosy. The programs of bundles do not.
    """
    if folder is None or not _caches() or jax.process_count() > 1:
        return None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
        environment = environment_fingerprint(sources)
    except OSError as error:
        warn(f"compiled programs are not kept: {folder}: {(error.strerror or str(error)).lower()}")
        return None
    except NoFingerprint:
        return None
    if hasattr(os, "getuid") and (about.st_uid != os.getuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
        warn(f"compiled programs are neither read nor kept: others may write to {folder}")
        return None
    if not os.access(folder, os.W_OK):
        warn(f"compiled programs are not kept: {folder}: permission denied")
        return None
    return ProgramStore(folder, environment)
