"""Runs compilers for absent devices in a separate process, because they print to stderr, end the process over unknown flags, and take
several GB. Results are cached by the content of the program."""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from argosy.core.errors import BadInput

PACKAGE = Path(__file__).parents[2]


def answer_of_compiler(function: str, inputs: Mapping[str, Any], device: str) -> Any:
    """Runs a function in a separate process. Returns its result, which is JSON.

    Args:
        function: the function as `module:name`. It is called with `inputs`.

    Raises:
        BadInput: the process ended without an answer.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer, log = Path(folder) / "answer.json", Path(folder) / "log.txt"
        environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}
        words = json.dumps({"function": function, "inputs": inputs, "answer": str(answer)})
        command = [sys.executable, "-c", "from argosy.jobs.plan.compiler import answer_alone; answer_alone()", words]
        with log.open("wb") as errors:
            done = subprocess.run(command, env=environment | {"JAX_PLATFORMS": "cpu"}, stdout=errors, stderr=errors, check=False)
        if not answer.exists():
            last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
            raise BadInput(
                f"the compiler for {device} ended with code {done.returncode}: {' '.join(last)[:300]}",
                hint="compile=false gives the analytic answer",
            )
        return json.loads(answer.read_text(encoding="utf-8"))


def answer_alone() -> None:
    """Is the main function of that process: reads the request from its last argument, and writes the result."""
    from importlib import import_module

    import jax

    # JAX cannot read programs for devices that are absent from its cache.
    jax.config.update("jax_enable_compilation_cache", False)
    words = json.loads(sys.argv[-1])
    module, _, name = words["function"].partition(":")
    Path(words["answer"]).write_text(json.dumps(getattr(import_module(module), name)(words["inputs"])), encoding="utf-8")


def cached_answer(content: Sequence[str], library: str, make: Callable[[], Any]) -> Any:
    """Returns a result from the cache, or computes a new one and stores it.

    Args:
        content: the programs, options and devices that determine the result. The code of estimates and versions are added.
        library: the package of the compiler.
    """
    path = _file(content, library)
    if path is not None and path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    answer = make()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(answer), encoding="utf-8")
        draft.replace(path)
    return answer


def _file(content: Sequence[str], library: str) -> Path | None:
    from argosy.jobs.machine import cache_folder

    folder = cache_folder("plans")
    if folder is None:
        return None
    code = b"".join(path.read_bytes() for room in ("run/plan", "observe/hlo") for path in sorted((PACKAGE / room).glob("*.py")))
    parts = [*content, version("jax"), version(library), hashlib.sha256(code).hexdigest()]
    return folder / f"{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()[:32]}.json"
