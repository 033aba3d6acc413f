"""Text that every machine has: the source code of Python's standard library, or only its docstrings.

The files are read in sorted order and never imported. They differ between versions of Python, so the version is part of the
fingerprint. Code is better than docstrings for a small model: samples that look like Python are easy to recognize, and the docstrings
are only 1.5 MB.
"""

import ast
import hashlib
import importlib.util
import os
import platform
import sysconfig
import warnings
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from argosy.core.errors import BadInput
from argosy.data.sources import Document, Source

# Tests are repetitive. Encodings and entities are tables, whose lines a small model would repeat forever. _sysconfigdata holds paths of
# the machine that built Python.
FOLDERS_LEFT_OUT = frozenset({
    "test", "tests", "idlelib", "lib2to3", "encodings", "site-packages", "dist-packages", "pydoc_data", "turtledemo",
    "ensurepip", "__pycache__",
})  # fmt: skip
FILES_LEFT_OUT = frozenset({"stringprep.py", "html/entities.py"})


class StandardLibrary(Source):
    """The source files of the standard library, one document per file: about 9 MB in Python 3.11."""

    name = "stdlib"

    def __init__(self, root: str | Path | None = None):
        self.root = Path(root or sysconfig.get_path("stdlib"))
        self.paths = sorted(python_files(self.root))
        if not self.paths:
            raise BadInput(
                "this Python has no source files of its standard library",
                where=str(self.root),
                hint="train on a text of your own: `data.source=PATH`",
            )
        self.size_bytes = self.disk_bytes = sum(path.stat().st_size for path in self.paths)
        self.files = len(self.paths)

    def documents(self) -> Iterator[Document]:
        for path in self.paths:
            if source := self.read(path):
                yield Document(source)

    def read(self, path: Path) -> str:
        """Reads the text of a source file, in the encoding that its first lines declare."""
        try:
            return importlib.util.decode_source(path.read_bytes())
        except (OSError, SyntaxError, UnicodeDecodeError) as e:
            raise BadInput(f"cannot read a file of the standard library: {e}", where=str(path)) from None

    @cached_property
    def sha256(self) -> str:
        """The sha256 of all files, because Linux distributions change files without changing the version."""
        digest = hashlib.sha256()
        for path in self.paths:
            digest.update(path.relative_to(self.root).as_posix().encode() + b"\0" + path.read_bytes())
        return digest.hexdigest()

    def fingerprint(self) -> dict[str, Any]:
        python = f"{platform.python_implementation()} {platform.python_version()}"
        return {"source": self.name, "source.python": python, "source.sha256": self.sha256}


def python_files(root: Path) -> Iterator[Path]:
    """Yields the source files below the root. FOLDERS_LEFT_OUT are not walked, because site-packages alone may hold a gigabyte."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in FOLDERS_LEFT_OUT]
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            is_table = path.relative_to(root).as_posix() in FILES_LEFT_OUT or path.name.startswith("_sysconfigdata")
            if not is_table:
                yield path


class Docstrings(StandardLibrary):
    """The docstrings of the standard library, one document per docstring, in the order of the files."""

    name = "docstrings"

    def documents(self) -> Iterator[Document]:
        for path in self.paths:
            yield from map(Document, docstrings(self.read(path)))


def docstrings(source: str) -> Iterator[str]:
    """Yields the cleaned docstrings of a module, outermost first; nothing if this Python cannot parse the module."""
    try:
        with warnings.catch_warnings():
            # Old modules hold escapes that newer parsers warn of.
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and text.strip():
                yield text
