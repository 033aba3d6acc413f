"""`argosy train RECIPE [key=value ...]`."""

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from argosy.cli.output import as_typed, conclude, say
from argosy.core.counts import plural
from argosy.core.process.signals import before_leaving
from argosy.jobs import machine
from argosy.launch.cluster import as_peer_lost, detect_place, join
from argosy.run.settings.recipe_files import about, recipes
from argosy.run.view import Quiet

LONGEST = max(map(len, recipes()))
RECIPES = "\n".join(f"  {name:{LONGEST}}  {about(name)}" for name in recipes())
HELP = f"""Trains by a recipe, or resumes: the run directory (dir=, by default runs/RECIPE) continues from its last good checkpoint.

\b
Recipes:
{RECIPES}

\b
Examples:
  argosy train tiny
  argosy train tiny steps=500 optimizer.learning_rate=1e-3 dir=runs/faster
  argosy train tiny data.source=my.txt dir=runs/mine
  argosy train my-recipe.yml model=llama3.2-1b
  argosy config explain optimizer      (what can be set; `argosy config new my-recipe` writes a recipe)"""

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(help=as_typed(HELP))
def train(
    recipe: Annotated[
        str, typer.Argument(help="a recipe's name, a YAML file, or a run: its directory or address", show_default=False)
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[key=value ...]", help="settings over the recipe's", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> int:
    from argosy.observe.life import counts_from_process_start
    from argosy.run.start.preflight import checked_settings, directory_of

    counts_from_process_start()
    place = detect_place(os.environ)
    # A mistake is answered before jax is imported, which takes seconds.
    reading = checked_settings(recipe, words or [])
    where = directory_of(reading, recipe)
    if place is None or not place.rank:
        most = "at most " if reading.value.data.epochs is not None else ""
        say(f"training {recipe} for {most}{plural(reading.value.steps, 'step')} in {where}; loading jax ...")
    machine.start_jax()
    from argosy.jobs.train import command_of, run
    from argosy.observe.terminal.live import Terminal
    from argosy.run.outcome import next_start, saved_words

    if place is not None:
        join(place)
    if place is not None and place.rank:
        # The leader shows the run and writes its files.
        with as_peer_lost():
            return run(reading, where, Quiet(), command_of(recipe, words or [])).exit_code
    stopped = "stopped; the same command continues from the last checkpoint, or starts anew if there is none"
    with before_leaving(lambda: say(stopped)), Terminal() as view, as_peer_lost():
        outcome = run(reading, where, view, command_of(recipe, words or []))
    if skipped := int(outcome.last.get("skipped", 0)):
        say(f"{skipped:,} of {plural(outcome.step, 'step')} were skipped: docs/guides/faults.md")
    if outcome.done and outcome.seconds:
        report = f", or open {outcome.dir}/report.html" if isinstance(outcome.dir, Path) else ""
        # What scores or ranks generates nothing.
        model, embedded = reading.value.model, reading.value.objective.text_pooling is not None
        generates = model.causal and not model.scored and not embedded
        follows = f"argosy generate {outcome.dir}" if generates else f"argosy export {outcome.dir} BUNDLE"
        if model.inputs == "images":
            from argosy.models.autoencoders.base import AutoencoderConfig

            follows = f"argosy eval {outcome.dir} tasks=images"
            if isinstance(model, AutoencoderConfig):
                follows = f"argosy train diffusion data.source=FOLDER encoders.autoencoder={outcome.dir}"
        if {"unet", "denoiser"} & set(reading.value.objective.roles):
            token, pipeline = getattr(model, "token", None), reading.value.encoders.pipeline
            prompt = f"{shlex.quote(f'a photo of a {token}')}" if token else "PROMPT"
            more = f"embeddings={outcome.dir}" if token else f"controlnet={outcome.dir} control_image=FILE"
            follows = f"argosy generate {pipeline} {prompt} image=out.png {more}"
        say(f"{outcome.dir}: step {outcome.step}. Next: {follows}{report}")
    if outcome.exit_code:
        say(
            f"stopped at step {outcome.step} of {outcome.steps}: {saved_words(outcome)}, and the same command {next_start(outcome)}"
        )
    document = {"dir": str(outcome.dir), "step": outcome.step, "steps": outcome.steps, "last": dict(outcome.last)}
    if as_json:
        conclude("", document, True)
    return outcome.exit_code
