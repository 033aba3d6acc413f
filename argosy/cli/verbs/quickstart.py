"""`argosy quickstart [dir=PATH]`."""

import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer

from argosy.cli.output import conclude, say
from argosy.core.process.streams import Unfailing
from argosy.core.settings import Settings, read_settings, words_layer
from argosy.jobs import machine

app = typer.Typer(rich_markup_mode=None, add_completion=False)


class Quickstart(Settings):
    """The place of the first run."""

    dir: str | None = None
    """A new directory. None: the next `runs/quickstart-N`."""


@app.command()
def quickstart(
    words: Annotated[list[str] | None, typer.Argument(metavar="[dir=PATH]", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> int:
    """Trains a small model from raw text on this machine, kills and resumes a run, generates, exports and reports. Takes one to two
    minutes on two free cores, and downloads nothing."""
    settings = read_settings(Quickstart, words_layer(words or [])).value
    say("No downloads, no account: nothing leaves this machine. Loading jax ...")
    machine.start_jax()
    from argosy.jobs.quickstart.acts import Stage
    from argosy.jobs.quickstart.acts import quickstart as job
    from argosy.observe.terminal.live import Terminal

    out: Any = Unfailing(sys.stderr if as_json else sys.stdout)

    def stream(text: str) -> None:
        print(text, end="", file=out, flush=True)

    say(machine.machine_summary())
    with Terminal() as view:
        story = job(settings.dir, Stage(say, view, stream))
    if as_json:
        conclude("", asdict(story), True)
    return story.exit_code
