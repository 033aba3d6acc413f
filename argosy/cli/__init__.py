"""The command line: `argosy VERB ...`. Data goes to stdout, words to stderr.

Exit codes: 0; 1 it failed; 2 the user's mistake, found before work began; 130 after Ctrl-C; 141 when a pipe broke.
A verb's module is imported only when the verb runs, so `argosy --help` imports neither jax nor numpy nor even Typer.
"""

import os
import sys
import traceback
from importlib import import_module
from types import ModuleType

from argosy.cli.output import fail
from argosy.core.errors import ArgosyError, BadInput, UnknownName

VERBS = {  # verb -> the module whose `app` runs it, and what it does
    "quickstart": ("argosy.cli.quickstart", "the first life: train, be killed, go on, talk, export, report"),
    "train": ("argosy.cli.train", "train by a recipe, or go on training"),
    "generate": ("argosy.cli.generate", "continue a prompt with a trained model"),
    "convert": ("argosy.cli.convert", "between Hub folder, GGUF (in) and Argosy checkpoint"),
    "data": ("argosy.cli.data", "a corpus to tokens, a look at them, a vocabulary of one's own"),
    "models": ("argosy.cli.models", "families and presets: sizes, memory, work"),
    "runs": ("argosy.cli.runs", "what runs there are, and what became of them"),
    "report": ("argosy.cli.report", "a run as one HTML page"),
    "doctor": ("argosy.cli.doctor", "what there is to compute with, and what is wrong with it"),
    "config": ("argosy.cli.config", "settings, and where each came from"),
}


def main(words: list[str] | None = None) -> int:
    """Runs one command and returns its exit code; `words` default to those of the process."""
    words = sys.argv[1:] if words is None else words
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except ArgosyError as error:
        fail(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head`: nobody is left to tell; stdout must not be flushed again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception:
        traceback.print_exc()
        return 1


def _run(words: list[str]) -> int:
    verb, *rest = words or ["--help"]
    if verb in ("--help", "-h", "help"):
        print(_help())
        return 0
    if verb in ("--version", "-V"):
        print(f"argosy {_version()}")
        return 0
    if verb not in VERBS:
        raise UnknownName("verb", verb, VERBS)
    return _run_app(import_module(VERBS[verb][0]), f"argosy {verb}", rest)


def _run_app(module: ModuleType, name: str, words: list[str]) -> int:
    """Runs a verb's Typer app; what Typer has to say about options is said as every other mistake is."""
    try:
        return module.app(args=words, prog_name=name, standalone_mode=False) or 0
    except ArgosyError:
        raise
    except Exception as error:
        message = getattr(error, "format_message", None)  # Typer's usage errors share no public class over its versions
        if message is None:
            raise
        raise BadInput(_lower(message().rstrip(".")), hint=f"`{name} --help` shows what it takes") from None


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _help() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {verb:{width}}  {about}" for verb, (_, about) in VERBS.items())
    return f"""usage: argosy VERB [ARGUMENTS] [key=value ...]

A foundation model's whole life on the JAX stack.

{verbs}

`argosy VERB --help` says more. `argosy --version` names the version."""


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # 20 ms that only this answer needs

    try:
        return version("argosy")
    except PackageNotFoundError:
        return "of a source tree that is not installed"
