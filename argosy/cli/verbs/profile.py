"""`argosy profile RUN [steps=3]`: what the steps of a run spend their time on."""

from typing import Annotated

import typer
from pydantic import Field

from argosy.cli.output import answer, say
from argosy.core.settings import Settings, read_settings, words_layer

app = typer.Typer(rich_markup_mode=None, add_completion=False)


class ProfileWords(Settings):
    """The capture to take or to show."""

    steps: int | None = Field(None, gt=0)
    """Steps to capture of a run that is under way. None: shows the newest capture that it took."""
    at: int | None = Field(None, gt=0)
    """Shows the capture that begins with this step."""
    rows: int = Field(12, gt=0)
    """Rows of each table."""
    timeout: float = Field(600.0, gt=0)
    """Seconds to wait for the capture."""


@app.command()
def profile_words(
    run: Annotated[str, typer.Argument(help="a run directory, or one of its captures: RUN/profile/12", show_default=False)],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[key=value ...]", help="settings: " + ", ".join(ProfileWords.model_fields), show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> None:
    """Shows where the time of steps goes: by layer, by kind and by operation. With steps=N, captures steps of a running job."""
    settings = read_settings(ProfileWords, words_layer(words or [])).value
    from argosy.jobs.profile import profile
    from argosy.observe.profile.table import as_document
    from argosy.observe.profile.text import profile_text

    table = profile(run, settings.steps, at=settings.at, timeout=settings.timeout, say=say)
    answer(profile_text(table, settings.rows), as_document(table), as_json)
