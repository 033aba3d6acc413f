"""`argosy chat`: conversations that stay consistent, in a pipe and on a terminal."""

import asyncio
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from serve.conftest import serving
from serve.fakes import END, STREAM, Hangup, endless, event, fake, response

from argosy.cli import main
from argosy.cli.lines import Lines, several
from argosy.cli.verbs.chat import COMMANDS, Session, open_chat
from argosy.client.client import AsgiTransport, ConnectionFailed, RequestRefused
from argosy.client.conversation import ChatReply, ChatSession
from argosy.client.http import Http
from argosy.client.settings import ChatEngineSettings, ChatSampling, ChatSettings
from argosy.core.errors import ArgosyError, BadInput
from argosy.infer.lm import LM
from argosy.infer.settings import NGram
from argosy.serve.app import App
from argosy.serve.service import Service

GREEDY = ChatSampling(temperature=0.0, max_tokens=4)


def ask_session(talk: ChatSession, text: str, **options: Any) -> ChatReply:
    return asyncio.run(talk.ask(text, lambda piece: None, **options))


@pytest.fixture
def talk(service: Service) -> ChatSession:
    return ChatSession(AsgiTransport(App(service).asgi), "tiny", GREEDY)


# ---------------------------------------------------------------- conversations


def test_an_answer_is_streamed_and_kept(talk: ChatSession):
    pieces: list[str] = []
    answer = asyncio.run(talk.ask("hi", pieces.append))
    assert "".join(pieces) == answer.text
    assert talk.messages == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": answer.text}]
    assert (answer.tokens, answer.prompt_tokens) == (4, len("<user>hi<assistant>"))
    assert "4 tokens" in str(answer)
    assert talk.totals.answers == 1


def test_each_turn_finds_the_ones_before_it_in_the_prefix_cache(lm: LM):
    with serving(lm) as service:
        talk = ChatSession(AsgiTransport(App(service).asgi), "tiny", GREEDY, system="be brief and kind")
        first = ask_session(talk, "tell me of the sea")
        reused = service.front.engine.stats.reused_tokens
        second = ask_session(talk, "more")
        page = service.front.engine.settings.page
        assert first.cached == 0
        # Every whole page of the first prompt. What follows is the answer's text, whose bytes may be other tokens.
        assert second.cached >= (first.prompt_tokens or 0) // page * page > 0
        assert service.front.engine.stats.reused_tokens - reused == second.cached
        assert talk.totals.cached == second.cached


def test_an_answer_that_is_stopped_keeps_what_was_read(talk: ChatSession):
    talk.sampling = ChatSampling(temperature=1.0, seed=2, max_tokens=60, stop="\x00")
    pieces: list[str] = []
    answer = asyncio.run(talk.ask("hi", pieces.append, lambda: len(pieces) > 2))
    assert answer.stopped
    assert answer.text == "".join(pieces)
    assert talk.messages[-1] == {"role": "assistant", "content": answer.text}
    assert str(answer).startswith("stopped after")


def fails_with(script: Any, error: type[ArgosyError], stop: Callable[[], Any] = lambda: False) -> ChatSession:
    """A conversation of one exchange whose next answer fails, or is stopped."""

    async def go() -> ChatSession:
        async with fake(script) as server, Http(server.url) as http:
            talk = ChatSession(http, "m", GREEDY)
            talk.messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            if error is ArgosyError:
                await talk.ask("c", lambda piece: None, stop)
            else:
                with pytest.raises(error):
                    await talk.ask("c", lambda piece: None, stop)
            return talk

    return asyncio.run(go())


@pytest.mark.parametrize(
    "parts, error",
    [
        ([response(b'{"error": {"message": "no"}}', "400 Bad Request")], RequestRefused),
        ([STREAM + event({"choices": [{"delta": {"content": "half an ans"}}]})], ConnectionFailed),
        ([STREAM + event({"error": {"message": "out of memory"}}) + END], RequestRefused),
        ([], ConnectionFailed),
    ],
)
def test_a_question_that_fails_leaves_no_trace(parts: list[bytes], error: type[ArgosyError]):
    async def script(path: str, body: Any, send: Callable[[bytes], Awaitable[None]]) -> None:
        for part in parts:
            await send(part)
        raise Hangup

    assert [m["content"] for m in fails_with(script, error).messages] == ["a", "b"]


def test_a_question_that_is_stopped_before_the_first_word_is_not_kept():
    async def script(path: str, body: Any, send: Callable[[bytes], Awaitable[None]]) -> None:
        await asyncio.Event().wait()

    talk = fails_with(script, ArgosyError, lambda: True)
    assert [m["content"] for m in talk.messages] == ["a", "b"]


def test_plain_text_is_continued(service: Service):
    talk = ChatSession(AsgiTransport(App(service).asgi), "tiny", GREEDY, plain=True)
    reply = ask_session(talk, "Once")
    ask_session(talk, "then")
    assert talk.request()[0] == "/v1/completions"
    assert talk.request()[1]["prompt"].startswith(f"Once{reply.text}\nthen")
    with pytest.raises(BadInput, match="no system message"):
        talk.system = "be brief"
    assert ChatSession(talk.server, "tiny", ChatSampling(), plain=True).request()[1]["max_tokens"] == 64


def test_messages_are_undone_saved_and_loaded(talk: ChatSession, tmp_path: Path):
    talk.system = "one"
    talk.system = "two"
    ask_session(talk, "a")
    ask_session(talk, "b")
    talk.save(tmp_path / "x.json")
    before = list(talk.messages)
    assert [m["role"] for m in before] == ["system", "user", "assistant", "user", "assistant"]
    assert talk.undo() == "b"
    assert talk.messages == before[:3]
    talk.reset()
    assert talk.messages == before[:1]
    with pytest.raises(BadInput, match="nothing was asked"):
        talk.undo()
    talk.load(tmp_path / "x.json")
    assert talk.messages == before
    (tmp_path / "list.json").write_text(json.dumps(before))
    talk.load(tmp_path / "list.json")
    for text in ("{}", "no json", '[{"role": "user"}]', '[{"role": "wizard", "content": "x"}]'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(BadInput, match="no conversation"):
            talk.load(tmp_path / "bad.json")
        with pytest.raises(BadInput, match="no conversation"):
            talk.save(tmp_path / "bad.json")
        assert (tmp_path / "bad.json").read_text() == text
    assert talk.messages == before


# ---------------------------------------------------------------- lines


@pytest.mark.parametrize(
    "lines, text, remaining",
    [
        (["hi", "x"], "hi", 1),
        (["one \\", "two\\", "three", "x"], "one \ntwo\nthree", 1),
        (['"""one', "", 'two"""', "x"], "one\n\ntwo", 1),
        (['"""', "one", '"""', "x"], "one", 1),
        (['"""one"""', "x"], "one", 1),
        (["one\\"], "one\n", 0),
        (['"""one', "two"], "one\ntwo", 0),
        ([""], "", 0),
    ],
)
def test_several_lines_are_one_text(lines: list[str], text: str, remaining: int):
    rest, prompts = list(lines), []

    def read(prompt: str) -> str:
        prompts.append(prompt)
        if not rest:
            raise EOFError
        return rest.pop(0)

    assert several(read, "> ", ". ") == text
    assert len(rest) == remaining
    assert prompts[0] == "> "
    assert set(prompts[1:]) <= {". "}
    if not remaining:
        with pytest.raises(EOFError):
            several(read, "> ", ". ")


# ---------------------------------------------------------------- a pipe


@pytest.fixture
def run_chat(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`argosy chat` at the server with these lines on stdin: exit code, stdout, stderr."""

    def run(*lines: str, words: str = "max_tokens=4 temperature=0") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        code = main(["chat", url, *words.split()])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_each_line_of_a_pipe_is_a_turn(run_chat: Callable[..., tuple[int, str, str]], talk: ChatSession):
    expected = [ask_session(talk, text).text for text in ("hi", "more")]
    code, out, err = run_chat("hi", "", "more", "/stats")
    assert code == 0
    assert out == "".join(f"{text}\n" for text in expected)
    assert err.count("[4 tokens") == 2
    assert "2 answers, 8 tokens" in err
    assert "4 messages" in err
    assert "> " not in out + err
    assert "\033" not in out + err


def test_commands_change_the_conversation(run_chat: Callable[..., tuple[int, str, str]], tmp_path: Path):
    file = tmp_path / "talk.json"
    lines = ["/system be kind", "hi", "/retry", "/set", "/set seed=3 temperature=none", "/undo", f"/save {file}", "/reset"]
    code, out, err = run_chat(*lines, f"/load {file}", "/system", "/help", "/quit", "never asked")
    assert code == 0
    first, again = out[: len(out) // 2], out[len(out) // 2 :]
    assert first == again, "greedy answers are equal"
    assert "max_tokens=4 temperature=0.0\n" in err
    assert "max_tokens=4 seed=3\n" in err
    assert json.loads(file.read_text())["messages"] == [{"role": "system", "content": "be kind"}]
    assert all(f"{name} {summary}" in err for name, summary in COMMANDS.items())


@pytest.mark.parametrize(
    "line, code, problem, hint",
    [
        ("/sett x=1", 2, "unknown command `/sett`", "did you mean `/set`"),
        ("/set temprature=1", 2, "unknown setting `temprature`", "temperature"),
        ("/set temperature=-1", 2, "`temperature` should be at least 0", ""),
        ("/undo", 2, "nothing was asked yet", ""),
        ("/retry", 2, "nothing was asked yet", ""),
        ("/save", 2, "which file?", "/save FILE"),
        ("/load /no/such", 2, "cannot read /no/such", ""),
        ("x" * 200, 1, "are more than the context of 128", "/reset forgets"),
    ],
)
def test_a_mistake_ends_a_pipe(
    run_chat: Callable[..., tuple[int, str, str]], line: str, code: int, problem: str, hint: str
):
    status, out, err = run_chat(line, "hi")
    assert status == code
    assert out == ""
    assert problem in err
    assert hint in err


def test_a_chat_with_a_model_speculates_if_asked(lm: LM, tmp_path: Path):
    lm.save(tmp_path / "model")
    with open_chat(str(tmp_path / "model"), ChatSettings(context=64, engine=ChatEngineSettings(speculative=NGram()))) as (_, engine):
        assert engine.speculation is not None


@pytest.mark.parametrize(
    "words, problem, hint",
    [
        (["chat", "http://127.0.0.1:1"], "cannot connect to http://127.0.0.1:1: connection refused", "argosy serve"),
        (["chat", "http://h", "temprature=3"], "unknown setting `temprature`", "temperature"),
        (["chat", "http://h", "plain=true", "system=x"], "no system message", ""),
        (["chat", "http://h", "engine.speculative=ngram"], "the server decides how it drafts", "argosy serve"),
        (["chat", "no-model"], "no-model", ""),
        (["chat", "x", "--model", "y"], "no such option: --model", "first word"),
    ],
)
def test_mistakes_are_answered(words: list[str], problem: str, hint: str, capsys: pytest.CaptureFixture[str]):
    assert main(words) in (1, 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert problem in err
    assert hint in err


def test_a_mistake_at_a_terminal_does_not_end_the_session(talk: ChatSession, capsys: pytest.CaptureFixture[str], monkeypatch: Any):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    lines = Lines()
    lines.is_live = True
    texts = iter(["/undo", "/bad", "hi"])

    def read(prompt: str) -> str:
        try:
            return next(texts)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(Lines, "__call__", lambda self, prompt: read(prompt))
    with asyncio.Runner() as runner:
        assert Session(talk, lines, runner).run() == 0
    assert capsys.readouterr().err.count("error: ") == 2
    assert len(talk.messages) == 2


# ---------------------------------------------------------------- a terminal


class Terminal:
    """`argosy chat` on a pseudo-terminal."""

    def __init__(self, url: str, state: Path):
        self.number, slave = pty.openpty()
        environment = os.environ | {"XDG_STATE_HOME": str(state), "TERM": "xterm", "ARGOSY_HUGE_PAGES": "0"}
        # Ctrl-C reaches the processes of the controlling terminal.
        start = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.executable, sys.argv[1:])"
        command = [sys.executable, "-c", start, sys.executable, "-P", "-m", "argosy", "chat", url]
        streams = {"stdin": slave, "stdout": slave, "stderr": slave}
        self.process = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
        os.close(slave)
        self.text = ""

    def until(self, text: str) -> str:
        """Reads up to a text, and returns what came before it."""
        deadline = time.monotonic() + 120
        while text not in self.text:
            assert time.monotonic() < deadline, self.text
            if select.select([self.number], [], [], 1)[0]:
                self.text += os.read(self.number, 10_000).decode()
        before, _, self.text = self.text.partition(text)
        return before

    def type(self, text: str) -> None:
        os.write(self.number, text.encode())


@contextmanager
def terminal(url: str, state: Path) -> Iterator[Terminal]:
    opened = Terminal(url, state)
    try:
        yield opened
    finally:
        opened.process.kill()
        opened.process.wait()
        os.close(opened.number)


def echoes(number: int) -> bool:
    return bool(termios.tcgetattr(number)[3] & termios.ECHO)


def test_ctrl_c_stops_an_answer_and_then_the_session(tmp_path: Path):
    with endless() as url, terminal(url, tmp_path) as screen:
        screen.until("ends the session")
        screen.until("> ")
        screen.type("go on\n")
        screen.until("word word")
        screen.type("\x03")
        screen.until("stopped after")
        screen.until("> ")
        screen.type("/stats\n")
        screen.until("2 messages")
        screen.until("> ")
        # On a line with text Ctrl-C discards the text.
        screen.type("half")
        screen.until("half")
        screen.type("\x03")
        screen.until("> ")
        screen.type("\x03")
        assert screen.process.wait(60) == 130
        assert echoes(screen.number)
    history = tmp_path / "argosy" / "chat_history"
    assert history.read_text().splitlines()[-2:] == ["go on", "/stats"]
    assert history.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143)])
def test_a_signal_at_the_prompt_gives_the_terminal_back(tmp_path: Path, number: int, code: int):
    with endless() as url, terminal(url, tmp_path) as screen:
        screen.until("> ")
        screen.process.send_signal(number)
        assert screen.process.wait(60) == code
        assert echoes(screen.number)


# ---------------------------------------------------------------- without jax


def test_mistakes_and_servers_that_are_gone_are_answered_without_jax(tmp_path: Path):
    commands = [
        ["chat", "http://h", "temprature=3"],
        ["chat", "http://127.0.0.1:1"],
        ["run-batch", ".", "missing", "out"],
        ["run-batch", ".", ".", "out", "seeed=1"],
        ["bench", "serve", "http://127.0.0.1:1", "num_prompts=1"],
        ["bench", "serve", "http://h", "goodput=x"],
    ]
    program = f"import sys\nfrom argosy.cli import main\nprint([main(words) for words in {commands!r}], 'jax' in sys.modules)"
    environment = os.environ | {"ARGOSY_HUGE_PAGES": "0"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.stdout == "[2, 1, 2, 2, 1, 2] False\n", done.stderr


def test_verbs_complete_their_settings(capsys: pytest.CaptureFixture[str]):
    for words, expected in (
        (["bench", ""], "serve\n"),
        (["bench", "serve", "http://h", "num_"], "num_prompts=\nnum_warmups=\n"),
        (["bench", "serve", "http://h", "api="], "api=completions\napi=chat\n"),
        (["chat", "x", "hist"], "history=\n"),
        (["run-batch", "x", "y", "z", "concur"], "concurrent=\n"),
    ):
        assert main(["completion", "words", *words]) == 0
        assert capsys.readouterr().out == expected
