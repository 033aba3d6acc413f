"""`argosy chat MODEL-or-URL`."""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from argosy.cli.flags import CHAT, translate_flags
from argosy.cli.lines import Lines, history_file, several
from argosy.cli.output import Doing, as_typed, can_color, fail, say
from argosy.cli.verbs.bench import api_key_of
from argosy.client.client import AsgiTransport, RequestRefused, is_url
from argosy.client.conversation import ChatSession, first_model, too_long
from argosy.client.http import Http
from argosy.client.settings import ChatSampling, ChatSettings
from argosy.core.errors import ArgosyError, BadInput, UnknownName
from argosy.core.hub.names import model_name
from argosy.core.process import signals
from argosy.core.settings import SettingsLayer, read_settings, words_layer
from argosy.jobs import machine
from argosy.jobs.image_models import check_one_tower

# Default limit on the tokens of a conversation: a cache of 128k tokens takes gigabytes.
CONTEXT = 8192

COMMANDS = {
    "/system": "TEXT  sets the system message; without TEXT shows it",
    "/set": "temperature=0.7 ...  changes sampling; without words shows it",
    "/retry": "answers the last question again",
    "/undo": "removes the last question and its answer",
    "/reset": "forgets the conversation, but not the system message",
    "/save": "FILE  writes the conversation as JSON",
    "/load": "FILE  loads a saved conversation",
    "/stats": "counts of this session",
    "/help": "this list",
    "/quit": "ends the session, as Ctrl-D does",
}

HELP = """Talks to a model, or to a server of OpenAI's API, in the terminal.

\b
Examples:
  argosy chat model.gguf system="Answer in one sentence." temperature=0.7
  argosy chat http://127.0.0.1:8000
  echo "What is a mesh?" | argosy chat runs/tiny         (each line of a pipe is a turn; answers go to stdout)

\b
In the session:
  Ctrl-C stops an answer; at an empty prompt it ends the session, as Ctrl-D does.
  A line that ends with a backslash continues on the next one; so do lines between two \"\"\".
""" + "\n".join(f"  {name} {description}" for name, description in COMMANDS.items())

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(context_settings={"ignore_unknown_options": True}, help=as_typed(HELP))
def chat(
    model: Annotated[
        str,
        typer.Argument(help="Hub folder, .gguf file, run, checkpoint or hf:OWNER/NAME; or a server's URL", show_default=False),
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[key=value ...]", help="settings: " + ", ".join(ChatSettings.model_fields), show_default=False
        ),
    ] = None,
) -> int:
    settings = read_settings(ChatSettings, words_layer(translate_flags(words or [], CHAT))).value
    if settings.plain and settings.system is not None:
        raise BadInput("plain text has no system message", hint="leave out `system` or `plain`")
    with open_chat(model, settings) as (talk, engine), asyncio.Runner() as runner:
        session = Session(talk, Lines(history_file() if settings.history else None, list(COMMANDS)), runner)
        if engine is not None:
            engine.say = session.progress
        return session.run()


@contextmanager
def open_chat(model: str, settings: ChatSettings) -> Iterator[tuple[ChatSession, Any]]:
    """A conversation with a server, or with the application of `argosy serve` in this process; and its engine."""
    if is_url(model):
        if settings.engine.speculative is not None:
            raise BadInput("engine.speculative: the server decides how it drafts", hint="give it to `argosy serve`")
        server = Http(model, key=api_key_of(settings.api_key), seconds=settings.timeout)

        async def served_name() -> str:
            try:
                return settings.model or await first_model(server)
            finally:
                await server.close()

        name = asyncio.run(served_name())
        say(f"{name} at {server.url}")
        yield ChatSession(server, name, chat_sampling(settings), system=settings.system, plain=settings.plain), None
        return
    with Doing() as doing:
        doing("loading jax")
        machine.start_jax()
        from argosy.infer.settings import EngineSettings
        from argosy.jobs.api import draft_of, load
        from argosy.serve import run
        from argosy.serve.app import App
        from argosy.serve.settings import ServerLimits, ServeSettings

        check_one_tower(model, "chat", doing)
        doing(f"loading {model}")
        stored: Any = {name: getattr(settings, name) for name in ("dtype", "adapter", "quantization")}
        lm = load(model, **stored, context=settings.context, blocks="auto")
        plain = settings.plain or not getattr(lm.tokenizer, "chat_templates", None)
        context = settings.context or min(lm.config.context, CONTEXT)
        engine = EngineSettings(slots=1, context=context, speculative=settings.engine.speculative)
        serve_settings = ServeSettings(engine=engine, limits=ServerLimits(seconds=2**28, body=2**26), warm_up=False, seed=settings.seed)
        name = settings.model or model_name(model)
        service = run.build_service(lm, name, serve_settings, doing, draft_of(engine, settings.dtype))
    try:
        if plain and settings.system is not None:
            raise BadInput("this model has no chat template, so it takes no system message", hint="leave out `system`")
        if plain and not settings.plain:
            say("this model has no chat template: what is typed is continued as plain text")
        given = {name for name in ChatSampling.model_fields if getattr(settings, name) is not None}
        defaults = " ".join(f"{key}={value}" for key, value in service.defaults.items() if key not in given)
        say(f"{service.name}: sampled with {defaults} where nothing else is set" if defaults else service.name)
        talk = ChatSession(AsgiTransport(App(service).asgi), service.name, chat_sampling(settings), system=settings.system, plain=plain)
        yield talk, service.front.engine
    finally:
        service.front.close()


def chat_sampling(settings: ChatSettings) -> ChatSampling:
    """The sampling settings among all."""
    return ChatSampling(**{name: getattr(settings, name) for name in ChatSampling.model_fields})


class Session:
    """Reads turns and commands from a terminal or a pipe, and prints the answers."""

    def __init__(self, talk: ChatSession, lines: Lines, runner: asyncio.Runner):
        self.talk, self.lines, self.runner = talk, lines, runner
        self.doing, self.waits = Doing(), False
        self.dim = ("\033[2m", "\033[0m") if can_color(sys.stderr) else ("", "")
        if self.lines.is_live:
            talk.aside = lambda text: print(self.dim[0] + text + self.dim[1], end="", file=sys.stderr, flush=True)

    def run(self) -> int:
        """Answers until the end of the input; returns the exit code."""
        if self.lines.is_live:
            say("/help lists the commands; Ctrl-D ends the session")
        try:
            while True:
                try:
                    text = several(self.lines, "> ", ". ")
                except KeyboardInterrupt:
                    say("")
                    if self.lines.typed():
                        continue
                    return 130
                try:
                    code = self.take(text)
                except ArgosyError as error:
                    if not self.lines.is_live:
                        raise
                    fail(error)
                    continue
                if code is not None:
                    return code
        except EOFError:
            if self.lines.is_live:
                say("")
            return 0
        # A signal other than Ctrl-C, at the prompt.
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 1
        finally:
            if isinstance(self.talk.server, Http):
                self.runner.run(self.talk.server.close())

    def take(self, text: str) -> int | None:
        """Runs a command, or asks. Returns an exit code if the session is over.

        Raises:
            ArgosyError: it cannot be done; the conversation is as before.
        """
        if not text.strip():
            return None
        if not text.startswith("/"):
            return self.ask(text)
        name, _, rest = text.strip().partition(" ")
        rest = rest.strip()
        if name not in COMMANDS:
            error = UnknownName("command", name, COMMANDS)
            raise BadInput(error.what, hint=f"{error.hint}; a blank before the slash makes it a message")
        if name == "/quit":
            return 0
        if name == "/retry":
            return self.retry()
        getattr(self, name[1:] + "_")(rest)
        return None

    # ---------------------------------------------------------------- asking

    def progress(self, stage: str) -> None:
        """Shows what the engine is doing until the answer begins: later, a line that replaces itself would erase text."""
        if self.waits:
            self.doing(stage)

    def ask(self, text: str) -> int | None:
        """Streams the answer to stdout, and says its speed on stderr."""

        def write(piece: str) -> None:
            self.waits = False
            self.doing.done()
            print(piece, end="", flush=True)

        self.waits = True
        with signals.asked_to_stop("") as stop:
            try:
                answer = self.runner.run(self.talk.ask(text, write, stop))
            except RequestRefused as error:
                if too_long(error):
                    error.hint = "/reset forgets the conversation, /undo its last question"
                elif "chat template" in error.what:
                    error.hint = "plain=true continues plain text"
                raise
            finally:
                self.waits = False
                self.doing.done()
        if not answer.text.endswith("\n") and (answer.text or not answer.stopped):
            print(flush=True)
        say(f"{self.dim[0]}[{answer}]{self.dim[1]}")
        return stop.code if stop.code not in (0, 130) or (stop.code and not self.lines.is_live) else None

    def retry(self) -> int | None:
        before = list(self.talk.messages)
        try:
            return self.ask(self.talk.undo())
        except ArgosyError:
            self.talk.messages = before
            raise

    # ---------------------------------------------------------------- commands

    def system_(self, text: str) -> None:
        if text:
            self.talk.system = text
        say(self.talk.system or "no system message")

    def set_(self, words: str) -> None:
        if words:
            current = SettingsLayer("this session", self.talk.sampling.model_dump(exclude_unset=True))
            self.talk.sampling = read_settings(ChatSampling, current, words_layer(words.split())).value
        sampling: dict[str, Any] = {name: value for name, value in self.talk.sampling if value is not None}
        say(" ".join(f"{name}={value}" for name, value in sampling.items()) or "the model's own sampling")

    def undo_(self, _: str) -> None:
        say(f"removed: {self.talk.undo()[:60]}")

    def reset_(self, _: str) -> None:
        self.talk.reset()
        say("forgotten")

    def save_(self, file: str) -> None:
        self.talk.save(_path(file))
        say(f"saved in {file}")

    def load_(self, file: str) -> None:
        self.talk.load(_path(file))
        say(f"{len(self.talk.messages)} messages from {file}")

    def stats_(self, _: str) -> None:
        say(f"{self.talk.totals}; {len(self.talk.messages)} messages")

    def help_(self, _: str) -> None:
        say("\n".join(f"{name} {description}" for name, description in COMMANDS.items()))


def _path(file: str) -> Path:
    if not file:
        raise BadInput("which file?", hint="/save FILE, /load FILE")
    return Path(file).expanduser()
