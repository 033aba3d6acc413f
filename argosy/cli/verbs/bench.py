"""`argosy bench serve URL [key=value ...]`."""

import asyncio
import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from argosy.cli.flags import BENCH_SERVE, translate_flags
from argosy.cli.output import Doing, answer, as_typed, say
from argosy.client.http import Http
from argosy.client.settings import BenchSettings
from argosy.core.errors import BadInput
from argosy.core.settings import read_settings, words_layer

# The first one that is set is the key of a server.
KEYS = ("ARGOSY_API_KEY", "OPENAI_API_KEY")
# A client that needs more of a core than this measures itself.
BUSY = 0.7

HELP = """Loads a server of OpenAI's API with streamed requests, and measures it: Argosy's, vLLM's, llama.cpp's.

\b
Examples:
  argosy bench serve http://127.0.0.1:8000 num_prompts=100 input_len=128 output_len=64 max_concurrency=8
  argosy bench serve http://127.0.0.1:8000 request_rate=4 goodput="ttft:200 tpot:50"
  argosy bench serve http://127.0.0.1:8000 data=prompts.jsonl api=chat save=result.json
  argosy bench serve http://127.0.0.1:8000 against=http://127.0.0.1:8001
  argosy bench serve http://127.0.0.1:8000 --num-prompts 100 --random-input-len 128     (flags of `vllm bench serve`)

Exit code 1 if any request failed."""

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.callback(invoke_without_command=True)
def bench(context: typer.Context) -> None:
    """Measures the speed of a running server."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command("serve", context_settings={"ignore_unknown_options": True}, help=as_typed(HELP))
def serve(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="URL [key=value ...]",
            help="the server's address, then settings: " + ", ".join(BenchSettings.model_fields),
            show_default=False,
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> int:
    url, rest = address(translate_flags(words, BENCH_SERVE))
    settings = read_settings(BenchSettings, words_layer(rest)).value
    urls = [Http(target).url for target in (url, settings.against) if target is not None]
    if settings.save and not Path(settings.save).absolute().parent.is_dir():
        raise BadInput(f"`save`: no folder {Path(settings.save).parent}")
    from argosy.client import bench_report as report
    from argosy.client.bench import BenchServer, run_bench
    from argosy.client.bench_data import SampleSource

    source = SampleSource(settings)
    with Doing() as doing:
        # In a log, hundreds of such lines would be noise.
        progress = doing if doing.is_live else None
        servers = [BenchServer(url, settings, api_key_of(settings.api_key), progress) for url in urls]
        rounds = asyncio.run(run_bench(servers, source, settings.rounds if settings.against else 1))
    figures = [report.round_figures(bench_round, settings) | {"server": bench_round.server} for bench_round in rounds]
    if settings.against:
        document = report.compare_rounds(figures, urls[0], urls[-1])
        text = report.comparison_text(document, settings)
    else:
        document = {name: value for name, value in figures[0].items() if name != "server"}
        text = report.round_text(document, settings)
    for bench_round, its in zip(rounds, figures):
        warn(bench_round, its, settings)
    if settings.save:
        save(Path(settings.save), document, [report.request_details(bench_round) for bench_round in rounds])
    answer(text, document, as_json)
    return 1 if any(numbers["failed"] for numbers in figures) else 0


def address(words: list[str]) -> tuple[str, list[str]]:
    """The server's address, given as the first word or as `url=`, and the other words.

    Raises:
        BadInput: there is no address.
    """
    for i, word in enumerate(words):
        if word.startswith("url=") or "=" not in word or "://" in word.partition("=")[0]:
            return word.removeprefix("url="), words[:i] + words[i + 1 :]
    raise BadInput("which server?", hint="its address is the first word, such as http://127.0.0.1:8000")


def api_key_of(api_key: str | None) -> str | None:
    """The key for a server: the given one, or that of the environment."""
    return api_key or next((value for name in KEYS if (value := os.environ.get(name))), None)


def warn(result: Any, summary: dict[str, Any], settings: BenchSettings) -> None:
    """Warns about failures, short answers and a client that was too busy."""
    if summary["failed"]:
        say(f"{summary['failed']:,} of {summary['num_prompts']:,} requests to {result.url} failed, the first: {summary['first_error']}")
    short = sum(o.error is None and o.output_len < o.max_tokens for o in result.outcomes)
    if short and (settings.ignore_eos or (settings.ignore_eos is None and settings.data == "random")):
        say(f"{short:,} answers of {result.url} are shorter than requested: it may not support `ignore_eos`")
    if summary["client_cpu"] > BUSY:
        say(f"this client was busy for {summary['client_cpu']:.0%} of the time of a core: the figures of {result.url} may be its own")


def save(path: Path, document: dict[str, Any], rounds: list[dict[str, list[Any]]]) -> None:
    """Writes the results, including those of every request. The file is replaced only when it is complete."""
    whole = document | (rounds[0] if "rounds" not in document else {})
    if "rounds" in document:
        whole["rounds"] = [numbers | its for numbers, its in zip(document["rounds"], rounds)]
    text = json.dumps(whole, allow_nan=False)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_text(text + "\n", encoding="utf-8")
        new.replace(path)
    except OSError as error:
        raise BadInput(f"cannot write {path}: {(error.strerror or '').lower()}") from None
