"""`argosy launch [engine=NAME key=value ...] -- VERB ...`."""

import sys
from importlib import import_module
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Any

import typer

from argosy.cli.output import say
from argosy.core.process import signals
from argosy.core.settings.explain import class_summary, default_text, type_text
from argosy.core.settings.schema import documented_fields
from argosy.launch.engines import ENGINES, SERVING, WRITTEN, named_engine

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
    a scheduler does. Other engines run servers on other machines.

    \b
    Engines (`argosy launch engine=NAME --help` lists the settings of one):
      local      processes of this machine; also one server of bundles that are split over them: -- predict REPOSITORY
      ray        processes on a Ray cluster
      slurm      writes a job script for sbatch, or submits it
      jobset     writes a Kubernetes manifest
      skypilot   writes a SkyPilot task
      kubernetes writes a Deployment and a Service of servers: -- predict REPOSITORY, -- serve MODEL
      kserve     writes a runtime of KServe and a service that uses it: -- predict /mnt/models
      rayserve   replicas of a server on Ray Serve: -- predict REPOSITORY

    \b
    Examples:
      argosy launch processes=4 -- train tiny dir=runs/four
      argosy launch processes=2 devices=4 restarts=3 logs=logs -- train my-recipe.yml
      argosy launch engine=slurm nodes=4 gpus=8 time=12:00:00 write=job.sh -- train my-recipe.yml
      argosy launch engine=kubernetes image=REGISTRY/argosy:1 volume=models secret=keys replicas=3 -- predict /models
    """
    at = next((i for i, word in enumerate(words) if "=" not in word or word.startswith("-")), len(words))
    setting_words, verb = words[:at], words[at + (words[at : at + 1] == ["--"]) :]
    if words[at : at + 1] in (["--help"], ["-h"]):
        sys.stdout.write(help_of(named_engine(setting_words)))
        return 0
    if (engine := named_engine(setting_words)) in SERVING:
        return launch_server(engine, setting_words, verb)
    if engine == "local" and verb[:1] == ["predict"]:
        return launch_together(setting_words, verb)
    from argosy.jobs.launch import prepare_launch, progress_of

    job = prepare_launch(setting_words, verb)
    if job.engine in WRITTEN:
        from argosy.jobs.launch_paths import remarks

        for remark in remarks(job):
            say(remark)
        return import_module(f"argosy.launch.{job.engine}").launch(job.command, job.settings, say)
    from argosy.launch import local, ray

    start = ray.run if job.engine == "ray" else local.run
    return start([sys.executable, "-m", "argosy", *verb], job.settings, say, progress_of(job))


def launch_together(words: list[str], verb: list[str]) -> int:
    """Runs one server as several processes of this machine, for bundles that are split over the devices of all of them."""
    from argosy.cli.flags import PREDICT, translate_flags
    from argosy.core.errors import mistakes_of, raise_mistakes
    from argosy.jobs.launch_servers import STEADY_S, Uptime, prepared_server, server_readers
    from argosy.launch import local
    from argosy.predict.repository import check_repository
    from argosy.web.process import check_open

    readers = server_readers(translate_flags, {"predict": PREDICT})
    job = prepared_server("local", words, verb, {"predict": readers["predict"]})
    checks = [check.run for check in local.checks(job.settings)]
    raise_mistakes(mistakes_of(*checks, lambda: check_open(job.server), lambda: check_repository(Path(job.command.words[1]))))
    about = f"{STEADY_S / 60:.0f} minutes of service", ""
    return local.run([sys.executable, "-m", "argosy", *job.command.words], job.settings, say, Uptime(), about)


def launch_server(engine: str, words: list[str], verb: list[str]) -> int:
    """Runs a server on other machines, or writes the manifest with which they do."""
    from argosy.cli.flags import PREDICT, SERVE, translate_flags
    from argosy.jobs.launch_servers import prepared_server, server_readers

    job = prepared_server(engine, words, verb, server_readers(translate_flags, {"predict": PREDICT, "serve": SERVE}))
    if engine != "rayserve":
        return import_module(f"argosy.launch.servers.{engine}").launch(job.command, job.settings, say)
    from argosy.jobs.replicas import replica_app
    from argosy.launch.servers import ray_serve
    from argosy.web.process import check_open

    ray_serve.check_replicated(job.command, job.server)
    check_open(job.server)
    models, server = str(Path(job.command.words[1]).resolve()), job.server.model_dump()

    def build() -> Any:
        return replica_app(models, server)

    with signals.asked_to_stop("finishing what runs; again to end now") as stop:
        ray_serve.launch(job.command, job.settings, job.server, build, say, stop)
    return stop.code


def help_of(name: str) -> str:
    """The settings of an engine, each with its type, default and meaning.

    Raises:
        UnknownName: there is no such engine.
    """
    schema = ENGINES[name]
    lines = [f"argosy launch engine={name} [key=value ...] -- VERB ...", "", *wrap_text(class_summary(schema), "  "), ""]
    for key, info in documented_fields(schema).items():
        default = default_text(info)
        lines += [f"  {key}  <{type_text(info)}>  {default if default == 'required' else f'default {default}'}"]
        lines += wrap_text(info.description or "", "      ")
    return "\n".join(lines) + "\n"


def wrap_text(text: str, indent: str) -> list[str]:
    return wrap(" ".join(text.split()), 100, initial_indent=indent, subsequent_indent=indent)
