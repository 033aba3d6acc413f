"""`argosy run-batch MODEL IN.jsonl OUT.jsonl [key=value ...]`."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from argosy.cli.flags import RUN_BATCH, translate_flags
from argosy.cli.output import Doing, as_typed, conclude, say
from argosy.cli.verbs.bench import api_key_of
from argosy.client import batch
from argosy.client.batch_files import BatchOutput, file_fingerprint, file_stamp, read_batch_rows
from argosy.client.client import AsgiTransport, ClientTransport, is_url
from argosy.client.http import Http
from argosy.client.settings import BatchSettings
from argosy.core.addresses import is_missing
from argosy.core.errors import BadInput
from argosy.core.hub.download import local_model
from argosy.core.hub.names import model_name
from argosy.core.process import signals
from argosy.core.settings import read_settings, words_layer
from argosy.jobs import machine

# Seconds between updates of the progress line; between lines where there is no terminal.
PROGRESS_S, PROGRESS_LOG_S = 1.0, 30.0
# Rows wait in the engine's queue, so time since arrival means nothing: ten years.
NO_LIMIT = 2**28

HELP = """Answers a file of requests in OpenAI's batch layout, thousands at a time, through the checks and the engine of `argosy serve`.

\b
Lines of IN:   {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}
Lines of OUT:  {"id": ..., "custom_id": "a", "response": {"status_code": 200, "request_id": ..., "body": {...}}, "error": null}

\b
Examples:
  argosy run-batch runs/tiny in.jsonl out.jsonl
  argosy run-batch model.gguf in.jsonl out.jsonl engine.slots=64 seed=1
  argosy run-batch http://127.0.0.1:8000 in.jsonl out.jsonl concurrent=64

Killed at any moment, the same command resumes: rows that are in OUT are not computed again. The rows of OUT are in the order in which
they ended. Exit code 1 if any row failed."""

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(context_settings={"ignore_unknown_options": True}, help=as_typed(HELP))
def run_batch(
    model: Annotated[
        str,
        typer.Argument(help="Hub folder, .gguf file, run, checkpoint or hf:OWNER/NAME; or a server's URL", show_default=False),
    ],
    source: Annotated[str, typer.Argument(metavar="IN.jsonl", help="requests, one a line", show_default=False)],
    target: Annotated[str, typer.Argument(metavar="OUT.jsonl", help="answers, one a line", show_default=False)],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[key=value ...]",
            help="settings: " + ", ".join(BatchSettings.model_fields) + "; flags of `vllm run-batch` work too",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> int:
    settings = read_settings(BatchSettings, words_layer(translate_flags(words or [], RUN_BATCH))).value
    requests, answers = Path(source), Path(target)
    if answers.exists() and requests.exists() and answers.samefile(requests):
        raise BadInput("IN and OUT are the same file")
    if not is_url(model) and is_missing(model):
        from argosy.run.settings.recipe_files import no_model

        raise no_model(model)
    if not is_url(model):
        model = local_model(model, say)
    begun = settings_of_completions(model, requests, settings)
    with BatchOutput(answers, begun) as out:
        lines = {row.line for row in read_batch_rows(requests)}
        before, tokens, start = len(out.done), out.tokens, time.monotonic()
        if before:
            torn = "; the last line was cut short, and is computed again" if out.was_torn else ""
            say(f"{answers}: {before:,} of {len(lines):,} rows are there{torn}")
        code = 0
        if lines - out.done:
            with server_of(model, settings) as (server, tries):
                start = time.monotonic()
                code = work(requests, out, server, settings, tries, len(lines))
        document = _summary(out, len(lines), before, tokens, time.monotonic() - start)
    if code:
        say(f"stopped: {len(out.done):,} of {len(lines):,} rows are in {answers}; the same command resumes")
    else:
        conclude(_text_of(document), document, as_json)
    return code or (1 if out.failed else 0)


def settings_of_completions(model: str, requests: Path, settings: BatchSettings) -> dict[str, Any]:
    """The settings that completions depend on."""
    completion_settings = {name: getattr(settings, name) for name in ("name", "seed", "dtype")}
    completion_settings["adapter"] = file_stamp(settings.adapter) if settings.adapter else None
    completion_settings["lora_modules"] = {name: file_stamp(folder) for name, folder in settings.lora_modules.items()}
    remote = is_url(model)
    return {
        "input": {"address": str(requests.resolve()), **file_fingerprint(requests)},
        "model": {"address": Http(model).url} if remote else file_stamp(model),
        "settings": {"seed": settings.seed} if remote else completion_settings | {"engine.context": settings.engine.context},
    }


@contextmanager
def server_of(model: str, settings: BatchSettings) -> Iterator[tuple[ClientTransport, int]]:
    """The server at a URL, or the application of `argosy serve` in this process; and how often a request is sent."""
    if is_url(model):
        yield Http(model, key=api_key_of(settings.api_key), seconds=settings.timeout), batch.TRIES
        return
    with Doing() as doing:
        doing("loading jax")
        machine.start_jax()
        from argosy.jobs.api import draft_of, load
        from argosy.serve import run
        from argosy.serve.app import App
        from argosy.serve.settings import ServerLimits, ServeSettings

        doing(f"loading {model}")
        stored: Any = {name: getattr(settings, name) for name in ("dtype", "adapter", "quantization")}
        lm = load(model, **stored, context=settings.engine.context, blocks="auto")
        limits = ServerLimits(queue=NO_LIMIT, queue_tokens=2**62, seconds=NO_LIMIT)
        serve_settings = ServeSettings(
            engine=settings.engine, limits=limits, warm_up=False, seed=settings.seed, lora_modules=settings.lora_modules
        )
        draft = draft_of(settings.engine, settings.dtype)
        service = run.running_server(lm, settings.name or model_name(model), serve_settings, doing, draft)
    service.front.engine.say = None
    try:
        yield AsgiTransport(App(service).asgi), 1
    finally:
        service.front.close()


def work(
    requests: Path, out: BatchOutput, server: ClientTransport, settings: BatchSettings, tries: int, total: int
) -> int:
    """Completes the missing rows. Returns the exit code of the signal that stopped it, or 0."""
    before, start = out.tokens, time.monotonic()
    printed_at = start

    async def go() -> None:
        try:
            await batch.complete_batch(requests, out, server, settings, tries=tries, stop=stop, say=progress)
        finally:
            if isinstance(server, Http):
                await server.close()

    def progress() -> None:
        nonlocal printed_at
        now = time.monotonic()
        if now - printed_at >= (PROGRESS_S if doing.is_live else PROGRESS_LOG_S):
            printed_at = now
            doing(f"{len(out.done):,} of {total:,} rows, {(out.tokens - before) / (now - start):.0f} tokens/s")

    with Doing() as doing, signals.asked_to_stop("stopping; again to end now") as stop:
        asyncio.run(go())
    return stop.code if len(out.done) < total else 0


def _summary(out: BatchOutput, total: int, before: int, tokens: int, seconds: float) -> dict[str, Any]:
    """What was done. tokens, before: output tokens and rows that were there at the start."""
    return {
        "output": str(out.path),
        "rows": total,
        "resumed": before,
        "failed": out.failed,
        "first_error": out.first_error,
        "prompt_tokens": out.prompt_tokens,
        "completion_tokens": out.tokens,
        "seconds": seconds,
        "tokens_per_s": (out.tokens - tokens) / seconds if seconds else 0.0,
    }


def _text_of(summary: dict[str, Any]) -> str:
    text = f"{summary['output']}: {summary['rows']:,} rows, {summary['completion_tokens']:,} tokens"
    if summary["rows"] > summary["resumed"]:
        text += f", {summary['tokens_per_s']:.1f} tokens/s"
    if summary["failed"]:
        text += f"; {summary['failed']:,} failed, the first: {summary['first_error']}"
    return text
