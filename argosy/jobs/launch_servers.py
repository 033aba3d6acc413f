"""The checks of `argosy launch` for servers: reads the settings of the engine and of the server, and finds all mistakes in both before
anything is written or starts.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from argosy.core.command import command_name
from argosy.core.errors import BadInput, mistakes_of, raise_mistakes
from argosy.core.settings import read_settings, words_layer
from argosy.launch.engines import ENGINES
from argosy.launch.rendered import Command
from argosy.web.settings import WebSettings

# The verbs that an engine runs, and the function that reads the settings of each.
Servers = Mapping[str, Callable[[Sequence[str]], WebSettings]]


# A server that ran for this many seconds before it failed may restart any number of times.
STEADY_S = 600.0


@dataclass(frozen=True)
class ServerLaunch:
    """A launch of servers without mistakes.

    engine: the name of the engine.
    settings: the settings of the engine.
    command: the command to run.
    server: the settings of the server.
    """

    engine: str
    settings: Any
    command: Command
    server: WebSettings


class Uptime:
    """Measures the progress of a server, by which consecutive restarts are counted: whether it ran for `STEADY_S` since the last
    call."""

    def __init__(self) -> None:
        self._called, self._times = time.monotonic(), 0

    def __call__(self) -> int:
        before, self._called = self._called, time.monotonic()
        self._times += self._called - before > STEADY_S
        return self._times


def prepared_server(engine: str, words: Sequence[str], verb: Sequence[str], servers: Servers) -> ServerLaunch:
    """Reads the settings of an engine and of the server that it runs.

    Args:
        words: `engine=NAME key=value`.
        verb: the verb, its model or repository, and its settings.
        servers: reads the settings of each verb from its words.

    Raises:
        UserError: there are mistakes in the settings. All mistakes in both are reported.
    """
    if not verb or verb[0] not in servers:
        problem = f"engine={engine} cannot run `{verb[0]}`" if verb else "launch needs a command"
        raise BadInput(problem, hint=f"`{command_name()} launch engine={engine} ... -- {next(iter(servers))} /models`")
    plain = [word for word in verb[1:] if "=" not in word and not word.startswith("-")]
    if len(plain) != 1:
        raise BadInput(f"`{' '.join(verb)}` names {len(plain) or 'no'} models", hint=f"{verb[0]} /models key=value ...")
    setting_words = [word for word in words if not word.startswith("engine=")]
    rest = [word for word in verb[1:] if word != plain[0]]
    read: dict[str, Any] = {}

    def engine_settings() -> None:
        read["engine"] = read_settings(ENGINES[engine], words_layer(setting_words)).value

    def server_settings() -> None:
        read["server"] = servers[verb[0]](rest)

    raise_mistakes(mistakes_of(engine_settings, server_settings))
    return ServerLaunch(engine, read["engine"], Command((verb[0], plain[0], *rest), ""), read["server"])


def server_readers(translated: Callable[[Sequence[str], Any], Sequence[str]], flags: Mapping[str, Any]) -> Servers:
    """Returns functions that read the settings of `predict` and `serve`.

    Args:
        translated: translates the words of other servers to ours.
        flags: the table of flags of each verb.
    """
    from argosy.predict.settings import PredictSettings
    from argosy.serve.settings import ServeSettings

    def read(schema: type[WebSettings], name: str, words: Sequence[str]) -> WebSettings:
        return read_settings(schema, words_layer(translated(words, flags.get(name)))).value

    return {"predict": partial(read, PredictSettings, "predict"), "serve": partial(read, ServeSettings, "serve")}
