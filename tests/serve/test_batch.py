"""`argosy run-batch`: every row once, whatever happens meanwhile."""

import asyncio
import contextlib
import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers import shared
from serve.conftest import LIMITS, serving
from serve.fakes import fake, response

from argosy.cli import main
from argosy.client import batch
from argosy.client.batch_files import BatchOutput, file_fingerprint, file_stamp, read_batch_rows
from argosy.client.client import AsgiTransport, ConnectionFailed, HttpReply, ask
from argosy.client.settings import BatchSettings
from argosy.core.errors import ArgosyError, BadInput, Busy, Damaged
from argosy.core.settings import read_settings, words_layer
from argosy.infer.lm import LM
from argosy.serve.app import App

BEGUN = {"input": {"address": "in", "sha256": "1"}, "model": {"address": "m", "step": 3}, "settings": {"seed": 0}}


def settings_of(*words: str) -> BatchSettings:
    return read_settings(BatchSettings, words_layer(list(words))).value


def request(name: str, body: Any = None, url: str = "/v1/completions") -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body or {"prompt": name}})


class Echo:
    """A server that answers with the body it was sent. asked: the bodies. status: of its answers."""

    def __init__(self, status: int = 200):
        self.asked: list[Any] = []
        self.status = status
        self.hold: Callable[[], Any] | None = None

    @asynccontextmanager
    async def send(self, method: str, path: str, body: Any = None) -> AsyncIterator[HttpReply]:
        self.asked.append(json.loads(body))
        if self.hold is not None:
            await self.hold()
        content = json.dumps({"id": "cmpl-1", "usage": {"prompt_tokens": 2, "completion_tokens": 3}, "echo": json.loads(body)})

        async def blocks() -> Any:
            yield content.encode()

        yield HttpReply(self.status, {}, blocks())


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def answer(source: Path, target: Path, server: Any, settings: BatchSettings | None = None, **kwargs: Any) -> BatchOutput:
    kwargs = {"stop": lambda: False} | kwargs
    with BatchOutput(target, BEGUN) as out:
        asyncio.run(batch.complete_batch(source, out, server, settings or settings_of(), **kwargs))
    return out


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join([request("a"), "", request("b\u2028é", {"prompt": "x", "seed": 7}), request("c")]) + "\n")
    return source, tmp_path / "out.jsonl"


# ---------------------------------------------------------------- rows


def test_a_row_is_answered_in_the_layout_of_openai(files: tuple[Path, Path]):
    server = Echo()
    out = answer(*files, server)
    lines = {line["custom_id"]: line for line in read_lines(files[1])}
    assert set(lines) == {"a", "b\u2028é", "c"}
    assert lines["a"] == {
        "id": "batch_req_1",
        "custom_id": "a",
        "response": {
            "status_code": 200,
            "request_id": "cmpl-1",
            "body": {
                "id": "cmpl-1",
                "usage": {"prompt_tokens": 2, "completion_tokens": 3},
                "echo": {"prompt": "a", "seed": 1},
            },
        },
        "error": None,
    }
    assert {line["id"] for line in lines.values()} == {"batch_req_1", "batch_req_3", "batch_req_4"}
    assert (out.failed, out.prompt_tokens, out.tokens) == (0, 6, 9)


def test_seeds_depend_on_the_line_and_not_on_the_run(files: tuple[Path, Path]):
    server = Echo()
    answer(*files, server, settings_of("seed=1"))
    assert {body["prompt"]: body["seed"] for body in server.asked} == {"a": 2**32 + 1, "x": 7, "c": 2**32 + 4}


@pytest.mark.parametrize(
    "line, problem",
    [
        ("{broken", "is no JSON"),
        ("[1]", "is no JSON object"),
        ('{"method": "POST", "url": "/x", "body": {}}', "`custom_id` is missing"),
        ('{"custom_id": 3, "method": "POST", "url": "/x", "body": {}}', "`custom_id` is missing or no text"),
        ('{"custom_id": "x", "method": "GET", "url": "/x", "body": {}}', '`method` is not "POST"'),
        ('{"custom_id": "x", "method": "POST", "url": "http://evil/x", "body": {}}', "`url` is no route"),
        ('{"custom_id": "x", "method": "POST", "url": "/x\\r\\nHost: y", "body": {}}', "`url` is no route"),
        ('{"custom_id": "x", "method": "POST", "url": "/x", "body": []}', "`body` is no JSON object"),
        ('{"custom_id": "x", "method": "POST", "url": "/x", "body": {}, "bdoy": 1}', "unknown field `bdoy`"),
        ('{"custom_id": "x", "method": "POST", "url": "/x", "body": {"stream": true}}', "`stream` is not for batches"),
        (request("a"), "`custom_id` 'a' is that of line 1"),
        ("\udcff", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
    ],
)
def test_a_line_that_is_no_request_is_answered_with_its_number(files: tuple[Path, Path], line: str, problem: str):
    source, target = files
    source.write_bytes(b"\n".join([request("a").encode(), line.encode("utf-8", "surrogateescape"), request("c").encode()]))
    server = Echo()
    out = answer(source, target, server)
    [bad] = [line for line in read_lines(target) if line["error"]]
    assert bad["id"] == "batch_req_2"
    assert bad["response"] is None
    assert bad["error"]["line"] == 2
    assert bad["error"]["message"].startswith("line 2")
    assert problem in bad["error"]["message"]
    assert [body["prompt"] for body in server.asked] == ["a", "c"]
    assert out.failed == 1
    assert out.first_error == bad["error"]["message"]


def test_an_error_of_the_api_is_an_answer(files: tuple[Path, Path]):
    out = answer(*files, Echo(400))
    assert [line["response"]["status_code"] for line in read_lines(files[1])] == [400] * 3
    assert all(line["error"] is None for line in read_lines(files[1]))
    assert out.failed == 3
    assert "status 400" in (out.first_error or "")


def test_half_a_surrogate_pair_breaks_nothing(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]):
    source, target = files
    source.write_text(r'{"custom_id": "\ud800", "method": "POST", "url": "/x", "body": {"prompt": "\udfff"}}')
    out = answer(source, target, Echo(400))
    assert read_lines(target)[0]["custom_id"] == "\ud800"
    assert (out.first_error or "").encode()


# ---------------------------------------------------------------- resuming


def test_a_last_line_cut_at_any_byte_is_repaired(files: tuple[Path, Path]):
    source, target = files
    answer(source, target, Echo())
    whole = target.read_bytes()
    begin = whole.rstrip(b"\n").rindex(b"\n") + 1
    for cut in range(begin, len(whole) + 1):
        target.write_bytes(whole[:cut])
        server = Echo()
        out = answer(source, target, server)
        assert Counter(line["custom_id"] for line in read_lines(target)) == Counter({"a": 1, "b\u2028é": 1, "c": 1}), cut
        assert len(server.asked) == (0 if cut == len(whole) else 1), cut
        assert out.was_torn == (begin < cut < len(whole)), cut
        assert out.tokens == 9


def test_an_output_of_one_torn_line_begins_anew(files: tuple[Path, Path]):
    source, target = files
    answer(source, target, Echo())
    target.write_bytes(target.read_bytes()[:20])
    answer(source, target, Echo())
    assert len(read_lines(target)) == 3


def test_a_run_that_is_stopped_resumes_and_answers_nothing_twice(tmp_path: Path):
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text("\n".join(request(f"r{i}") for i in range(50)))
    server, stopped = Echo(), False

    async def hold() -> None:
        nonlocal stopped
        if len(server.asked) > 20:
            stopped = True
            await asyncio.Event().wait()

    server.hold = hold
    answer(source, target, server, settings_of("concurrent=4"), stop=lambda: stopped)
    done = {line["custom_id"] for line in read_lines(target)}
    assert 16 <= len(done) <= 20
    again = Echo()
    answer(source, target, again, settings_of("concurrent=4"))
    assert {body["prompt"] for body in again.asked} == {f"r{i}" for i in range(50)} - done
    assert Counter(line["custom_id"] for line in read_lines(target)) == Counter(f"r{i}" for i in range(50))


@pytest.mark.parametrize(
    "now, problem",
    [
        ({"input": {"address": "in", "sha256": "2"}}, "another version of its input"),
        ({"input": {"address": "other", "sha256": "2"}}, "the input in, not other"),
        ({"model": {"address": "m", "step": 4}}, "another version of its model"),
        ({"model": {"address": "http://h"}}, "the model m, not http://h"),
        ({"settings": {"seed": 1}}, "seed=0, not 1"),
        ({"settings": {"seed": 0, "name": "x"}}, "name=None, not x"),
    ],
)
def test_an_output_that_was_begun_otherwise_is_refused(files: tuple[Path, Path], now: dict[str, Any], problem: str):
    answer(*files, Echo())
    before = files[1].read_bytes()
    with pytest.raises(BadInput) as error:
        BatchOutput(files[1], BEGUN | now)
    assert problem in str(error.value)
    assert "remove" in (error.value.hint or "")
    assert files[1].read_bytes() == before


def test_files_that_were_moved_are_the_same(files: tuple[Path, Path]):
    answer(*files, Echo())
    locations = {"input": {"address": "there", "sha256": "1"}, "model": {"address": "there", "step": 3}}
    with BatchOutput(files[1], BEGUN | locations) as out:
        assert len(out.done) == 3


def test_a_file_of_something_else_is_left_alone(files: tuple[Path, Path]):
    files[1].write_text("my thesis\n")
    with pytest.raises(BadInput, match="no record of the run that began it"):
        BatchOutput(files[1], BEGUN)
    assert files[1].read_text() == "my thesis\n"
    files[1].write_text("")
    answer(*files, Echo())
    files[1].write_text('{"id": "x"}\n' + files[1].read_text())
    with pytest.raises(Damaged, match="line 1"):
        BatchOutput(files[1], BEGUN)


def test_two_processes_do_not_write_one_file(files: tuple[Path, Path]):
    with BatchOutput(files[1], BEGUN), pytest.raises(Busy, match="another process is writing"):
        BatchOutput(files[1], BEGUN)
    with BatchOutput(files[1], BEGUN):
        pass


def test_a_full_disk_fails_and_resumes(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch):
    write = os.write

    def full(file: int, data: Any) -> int:
        if bytes(data).startswith(b'{"id": "batch_req_3"'):
            write(file, bytes(data)[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(ArgosyError, match="no space left") as error:
        answer(*files, Echo())
    assert error.value.exit_code == 1
    monkeypatch.setattr(os, "write", write)
    assert files[1].read_bytes().endswith(b"\n")
    answer(*files, Echo())
    assert Counter(line["id"] for line in read_lines(files[1])) == Counter(f"batch_req_{n}" for n in (1, 3, 4))


# ---------------------------------------------------------------- servers


def test_a_server_without_time_is_asked_again_and_its_refusal_is_no_answer(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(batch, "LONGEST_WAIT_S", 0.01)
    with pytest.raises(ConnectionFailed, match="no time for line"):
        answer(*files, Echo(503), tries=3)
    assert files[1].read_bytes() == b""
    times = 0

    async def script(path: str, body: Any, send: Any) -> None:
        nonlocal times
        times += 1
        busy = times in (1, 3)
        await send(response(b'{"id": "x"}', "429 Too Many Requests" if busy else "200 OK"))

    async def go() -> None:
        from argosy.client.http import Http

        async with fake(script) as server, Http(server.url) as http:
            with BatchOutput(files[1], BEGUN) as out:
                await batch.complete_batch(files[0], out, http, settings_of("concurrent=1"), tries=3, stop=lambda: False)

    asyncio.run(go())
    assert times == 5
    assert [line["response"]["status_code"] for line in read_lines(files[1])] == [200] * 3


def test_a_server_that_is_gone_stops_the_run(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: Any):
    monkeypatch.setattr(batch, "LONGEST_WAIT_S", 0.0)
    source, target = map(str, files)
    assert main(["run-batch", "http://127.0.0.1:1", source, target]) == 1
    assert "cannot connect to http://127.0.0.1:1: connection refused" in capsys.readouterr().err
    assert Path(target).read_bytes() == b""


def bodies(lm: LM, count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"row {i}", "max_tokens": 5 + i % 7, "temperature": 1.0, "ignore_eos": True} for i in range(count)]


def test_rows_are_answered_by_the_server_s_own_code_and_share_its_steps(lm: LM, tmp_path: Path):
    source, target = tmp_path / "in", tmp_path / "out"
    requests = bodies(lm, 24)
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    lines = [request(f"r{i}", body) for i, body in enumerate(requests)]
    lines += [request("chat", chat, "/v1/chat/completions"), request("ids", {"prompt": "hé"}, "/tokenize")]
    lines += [request("wrong", {"prompt": "x", "temprature": 1}), request("where", {}, "/v1/nowhere")]
    new = {"/v1/responses": {"input": "hi", "max_output_tokens": 4}, "/v1/messages": chat}
    lines += [request(path, body, path) for path, body in new.items()]
    source.write_text("\n".join(lines))
    # More rows than the queue of a server that protects itself would take.
    limits = LIMITS.model_copy(update={"queue": 100_000})
    with serving(lm, limits) as service:
        server = AsgiTransport(App(service).asgi)
        engine = service.front.engine
        steps, drawn_tokens = engine.stats.steps, engine.stats.drawn_tokens
        out = answer(source, target, server)
        steps, drawn_tokens = engine.stats.steps - steps, engine.stats.drawn_tokens - drawn_tokens
        responses = {line["custom_id"]: line["response"] for line in read_lines(target)}
        alone = [asyncio.run(ask(server, "POST", "/v1/completions", body | {"seed": i + 1})) for i, body in enumerate(requests)]
        for line, (path, body) in enumerate(new.items(), 29):
            alike = asyncio.run(ask(server, "POST", path, body | {"seed": line}))
            name = "output" if path == "/v1/responses" else "content"
            text = [body[name][0].get("text") or body[name][0]["content"][0]["text"] for body in (responses[path]["body"], alike)]
            assert text[0] == text[1], "seeded by its line"
    texts = [responses[f"r{i}"]["body"]["choices"][0]["text"] for i in range(24)]
    assert texts == [answer["choices"][0]["text"] for answer in alone], "as if each had been asked for by itself"
    assert steps < drawn_tokens / 2, "rows shared steps"
    assert responses["chat"]["status_code"] == 200
    assert responses["ids"]["body"]["tokens"] == [104, 195, 169]
    assert responses["wrong"]["status_code"] == 400
    assert responses["wrong"]["body"]["error"]["param"] == "temprature"
    assert responses["where"]["status_code"] == 404
    assert out.failed == 2


def test_an_engine_that_dies_fails_no_row(lm: LM, files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]):
    with serving(lm) as service:

        def step() -> Sequence[Any]:
            raise RuntimeError("the device is gone")

        service.front.engine.step = step  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(ConnectionFailed, match="the engine has stopped"):
            answer(*files, AsgiTransport(App(service).asgi))
    assert files[1].read_bytes() == b""
    assert "the device is gone" in capsys.readouterr().err


# ---------------------------------------------------------------- the command


def test_the_command_answers_resumes_and_refuses(url: str, files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]):
    source, target = map(str, files)
    lines = [request(f"r{i}", {"prompt": "abc", "max_tokens": 3, "ignore_eos": True}) for i in range(3)]
    files[0].write_text("\n".join([*lines, "{broken"]))
    assert main(["run-batch", url, source, target, "--json"]) == 1
    summary = json.loads(capsys.readouterr().out)
    assert (summary["rows"], summary["failed"], summary["resumed"], summary["completion_tokens"]) == (4, 1, 0, 9)
    assert summary["first_error"] == "line 4 is no JSON"
    before = files[1].read_bytes()
    assert main(["run-batch", url, source, target]) == 1
    out, err = capsys.readouterr()
    assert out == f"{target}: 4 rows, 9 tokens; 1 failed, the first: line 4 is no JSON\n"
    assert "4 of 4 rows are there" in err
    assert files[1].read_bytes() == before
    assert main(["run-batch", url, source, target, "seed=2"]) == 2
    assert "was begun with seed=0, not 2" in capsys.readouterr().err
    files[0].write_text("\n".join(lines))
    assert main(["run-batch", url, source, target]) == 2
    assert "another version of its input" in capsys.readouterr().err
    files[1].unlink()
    assert main(["run-batch", url, source, target]) == 0


@pytest.mark.parametrize(
    "words, problem, hint",
    [
        (["run-batch", "no-model", "{in}", "{out}"], "no-model", ""),
        (["run-batch", "{here}", "missing.jsonl", "{out}"], "cannot read missing.jsonl", ""),
        (["run-batch", "{here}", "{in}", "{in}"], "IN and OUT are the same file", ""),
        (["run-batch", "{here}", "{in}", "/no/such/out"], "cannot write /no/such/out", ""),
        (["run-batch", "{here}", "{in}", "{out}", "concurent=3"], "unknown setting `concurent`", "concurrent"),
        (["run-batch", "{here}", "{in}", "{out}", "-i", "x"], "no such option: -i", "run-batch MODEL"),
        (["run-batch", "{here}", "{in}"], "missing argument", "--help"),
    ],
)
def test_mistakes_are_answered(
    words: list[str], problem: str, hint: str, files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
):
    names = {"in": files[0], "out": files[1], "here": files[0].parent}
    assert main([word.format(**names) for word in words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert problem in err
    assert hint in err
    assert not files[1].exists()


def test_versions_of_inputs_and_models_are_told_apart(tmp_path: Path):
    file = tmp_path / "a"
    file.write_text("one")
    first, model = file_fingerprint(file), file_stamp(str(tmp_path))
    assert first["bytes"] == 3
    file.write_text("two")
    assert file_fingerprint(file) != first
    os.utime(file, (1, 1))
    assert file_stamp(str(tmp_path)) != model
    for step in ("9", "10"):
        (tmp_path / "checkpoints" / step).mkdir(parents=True)
    assert file_stamp(str(tmp_path))["step"] == 10
    assert [row.line for row in read_batch_rows(file)] == [1]


# ---------------------------------------------------------------- killed


def start_batch(source: Path, target: Path, *words: str) -> subprocess.Popen[str]:
    model, sizes = shared("models/stories260k"), ["engine.slots=4", "engine.context=128"]
    command = [sys.executable, "-P", "-m", "argosy", "run-batch", str(model), str(source), str(target), *sizes, *words]
    environment = os.environ | {"ARGOSY_HUGE_PAGES": "0"}
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def batch_of(path: Path, count: int) -> None:
    fields = {"max_tokens": 40, "temperature": 1.0, "ignore_eos": True}
    path.write_text("\n".join(request(f"r{i}", {"prompt": f"Once upon a time, {i}", **fields}) for i in range(count)))


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 600
    while not condition() and process.poll() is None:
        if time.monotonic() > deadline:
            process.kill()
            raise AssertionError("nothing happened for ten minutes")
        time.sleep(0.01)


@pytest.mark.slow
def test_killed_again_and_again_it_answers_each_row_once_and_the_same(tmp_path: Path):
    source, target, whole = tmp_path / "in", tmp_path / "out", tmp_path / "whole"
    batch_of(source, 300)
    with start_batch(source, whole) as process:
        assert process.wait(900) == 0
    expected = {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in read_lines(whole)}
    draw = random.Random(0)
    for kill in range(6):
        with start_batch(source, target) as process:
            size = target.stat().st_size if target.exists() else 0
            if kill:
                wait_for(lambda size=size: target.exists() and target.stat().st_size > size, process)
                time.sleep(draw.uniform(0, 0.4))
            else:
                wait_for(target.exists, process)
            process.kill()
            process.communicate()
    with start_batch(source, target) as process:
        stderr = process.communicate()[1]
        assert process.returncode == 0, stderr
    assert "of 300 rows are there" in stderr
    lines = read_lines(target)
    assert Counter(line["custom_id"] for line in lines) == Counter(list(expected))
    assert {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in lines} == expected


@pytest.mark.slow
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_it_with_whole_lines_and_says_how_to_resume(tmp_path: Path, number: int, code: int):
    source, target = tmp_path / "in", tmp_path / "out"
    batch_of(source, 2000)
    with start_batch(source, target) as process:
        try:
            wait_for(lambda: target.exists() and target.stat().st_size > 0, process)
            process.send_signal(number)
            out, err = process.communicate(timeout=300)
        finally:
            with contextlib.suppress(OSError):
                process.kill()
    assert process.returncode == code
    assert out == ""
    assert f"of 2,000 rows are in {target}; the same command resumes" in err
    assert target.read_bytes().endswith(b"\n")
    assert 0 < len(read_lines(target)) < 2000
