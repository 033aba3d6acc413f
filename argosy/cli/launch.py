"""`argosy launch [engine=NAME key=value ...] -- VERB ...`."""

import sys
from importlib import import_module
from textwrap import wrap
from typing import Annotated, Any

import typer

from argosy.cli.output import say
from argosy.core.command import command
from argosy.core.errors import BadInput
from argosy.core.explain import default_text, summary, type_text
from argosy.core.schema import documented
from argosy.core.settings import read_settings, words_layer
from argosy.launch.settings import ENGINES

# The verbs that several processes can run together.
LAUNCHED = ("train",)
# The engines that write a file for a scheduler.
WRITTEN = ("slurm", "jobset", "skypilot")
app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def launch(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[key=value ...] -- VERB ...",
            help="settings: engine, and those of the engine; then the command that runs",
            show_default=False,
        ),
    ],
) -> int:
    """Runs a command as several processes, and starts them again from the last checkpoint when one ends; or writes the file with which
    a scheduler does.

    \b
    Engines (`argosy launch engine=NAME --help` lists the settings of one):
      local      processes of this machine
      ray        processes on a Ray cluster
      slurm      writes a job script for sbatch, or submits it
      jobset     writes a Kubernetes manifest
      skypilot   writes a SkyPilot task

    \b
    Examples:
      argosy launch processes=4 -- train tiny dir=runs/four
      argosy launch processes=2 devices=4 restarts=3 logs=logs -- train my-recipe.yml
      argosy launch engine=slurm nodes=4 gpus=8 time=12:00:00 write=job.sh -- train my-recipe.yml
    """
    at = next((i for i, word in enumerate(words) if "=" not in word or word.startswith("-")), len(words))
    own, verb = words[:at], words[at + (words[at : at + 1] == ["--"]) :]
    if words[at : at + 1] in (["--help"], ["-h"]):
        sys.stdout.write(help_of(named(own)))
        return 0
    if not verb:
        raise BadInput("launch needs a command", hint=f"`{command()} launch processes=2 -- train tiny`")
    if verb[0] not in LAUNCHED:
        raise BadInput(f"several processes cannot run `{verb[0]}`", hint=f"they run {', '.join(LAUNCHED)}")
    name, settings = engine_of(own)
    from argosy.jobs.launched import check, command_of, progress_of

    if name in WRITTEN:
        module = import_module(f"argosy.launch.{name}")
        return module.launch(command_of(verb, same_files=name == "slurm"), settings, say)
    from argosy.launch import local, ray

    check(verb)
    start = ray.run if name == "ray" else local.run
    return start([sys.executable, "-m", "argosy", *verb], settings, say, progress_of(verb))


def named(words: list[str]) -> str:
    """The engine that the words name."""
    found = [word.partition("=")[2] for word in words if word.startswith("engine=")]
    return found[-1] if found else "local"


def engine_of(words: list[str]) -> tuple[str, Any]:
    """The engine that the words name, and its settings.

    Raises:
        UserError: there is no such engine, or it has no such setting.
    """
    name = named(words)
    return name, read_settings(ENGINES[name], words_layer(word for word in words if not word.startswith("engine="))).value


def help_of(name: str) -> str:
    """The settings of an engine, each with its type, default and meaning.

    Raises:
        UnknownName: there is no such engine.
    """
    schema = ENGINES[name]
    lines = [f"argosy launch engine={name} [key=value ...] -- VERB ...", "", *wrapped(summary(schema), "  "), ""]
    for key, info in documented(schema).items():
        default = default_text(info)
        lines += [f"  {key}  <{type_text(info)}>  {default if default == 'required' else f'default {default}'}"]
        lines += wrapped(info.description or "", "      ")
    return "\n".join(lines) + "\n"


def wrapped(text: str, indent: str) -> list[str]:
    return wrap(" ".join(text.split()), 100, initial_indent=indent, subsequent_indent=indent)
