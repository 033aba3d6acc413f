"""A teacher behind a server: our own on the loopback teaches as its weights do, and every way in which a server may fail is told."""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from campaign_kill import SMALL
from helpers import Heard
from serve.conftest import LIMITS, listening, serving

import argosy
from argosy.core.errors import ArgosyError, BadInput, UserError
from argosy.core.storage import Store
from argosy.data.tokenizers.load import load_tokenizer
from argosy.infer.lm import LM
from argosy.jobs.quickstart.proof import digest
from argosy.observe.metrics import by_step, read
from argosy.run.distillation.endpoint import WAITS_S, Endpoint, message_of, retry_delay
from argosy.run.distillation.served import texts

TOP = 16
IDS = list(b"Once")


@pytest.fixture(scope="module")
def url(lm: LM) -> Iterator[str]:
    with serving(lm, replace_limits()) as service, listening(service) as address:
        yield f"{address}/v1"


def replace_limits() -> Any:
    return LIMITS.model_copy(update={"logprobs": 32}) if hasattr(LIMITS, "model_copy") else replace(LIMITS, logprobs=32)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts and answers; only answers count."""
    path = tmp_path_factory.mktemp("data") / "answers.jsonl"
    rows = [{"prompt": f"{i} {i % 7}:", "completion": f" {i % 10}" * (1 + i % 3)} for i in range(24)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def fit(data: Path, run: Path, *more: str, steps: int = 4) -> str:
    words = [word for word in SMALL if not word.startswith(("data.", "eval.", "objective", "steps"))]
    words += [f"data.source={data}", "data.sequence=32", "data.batch=8", "data.epochs=99", "data.held_out=0.2", "mesh.data=1"]
    words += [f"data.cache={run.parent / 'cache'}", "eval.every=3", "eval.batches=1", "checkpoint.every=2", "log.every=1"]
    words += ["model.context=64", "model.vocab=258", "model.layers=1", "model.family=llama", "optimizer=adamw"]
    words += ["optimizer.learning_rate=1e-2", "schedule=constant", f"dir={run}", "objective.logits=cached", f"objective.top={TOP}"]
    heard = Heard()
    argosy.fit("distill", *words, *more, view=heard, steps=steps)
    return heard.words


def numbers(run: Path, name: str) -> dict[int, float]:
    return by_step(read(Store(run)), name)


@pytest.mark.slow
def test_our_own_server_teaches_as_its_weights_do(lm: LM, url: str, data: Path, tmp_path: Path):
    lm.save(tmp_path / "teacher")
    fit(data, tmp_path / "local" / "run", f"objective.teacher={tmp_path / 'teacher'}")
    served = [f"objective.teacher={url}", "objective.teacher_model=tiny"]
    output = fit(data, tmp_path / "served" / "run", *served)
    assert f"teacher tiny at {url}" in output
    for name in ("loss", "kl", "agreement"):
        local, other = numbers(tmp_path / "local" / "run", name), numbers(tmp_path / "served" / "run", name)
        assert other == pytest.approx(local, rel=2e-3, abs=1e-5), name
    assert numbers(tmp_path / "served" / "run", "eval_kl").keys() == numbers(tmp_path / "local" / "run", "eval_kl").keys()


@pytest.mark.slow
def test_a_resume_is_bit_for_bit_and_asks_nothing_again(url: str, data: Path, tmp_path: Path):
    served = [f"objective.teacher={url}", "objective.teacher_model=tiny"]
    fit(data, tmp_path / "whole", *served)
    fit(data, tmp_path / "halves", *served, steps=2)
    assert "likeliest" not in fit(data, tmp_path / "halves", *served)
    assert digest(tmp_path / "whole", 4) == digest(tmp_path / "halves", 4)
    with pytest.raises(UserError, match="teacher"):
        fit(data, tmp_path / "halves", f"objective.teacher={url}", "objective.teacher_model=other", steps=6)


@pytest.mark.parametrize(
    ("words", "problem", "hint"),
    [
        (["objective.teacher={url}"], "teacher_model is missing", ""),
        (["objective.teacher={url}", "objective.teacher_model=nobody"], "HTTP 404", "GET /v1/models"),
        (["objective.teacher={url}", "objective.teacher_model=tiny", "objective.top=33"], "HTTP 400: `prompt_logprobs` is 33", "top"),
        (["objective.teacher={url}", "objective.teacher_model=tiny", "objective.logits=online"], "logits=cached asks it once", ""),
        (["objective.teacher={url}", "objective.teacher_model=tiny", "objective.temperature=2"], "at temperature 1", ""),
        (["objective.teacher={url}", "objective.teacher_model=tiny", "objective.hidden=mse"], "keeps no hidden states", ""),
        (["objective.teacher=http://me:secret@localhost/v1", "objective.teacher_model=x"], "holds a name or a password", "ARGOSY_"),
        (["objective.teacher=http:///v1", "objective.teacher_model=x"], "is not the address of a server", ""),
        (["objective.teacher=folder", "objective.teacher_model=x"], "teacher_model is for a teacher that is the address", ""),
        (["objective={{name: gkd, teacher: {url}}}"], "gives its likeliest tokens on given text", ""),
    ],
)
def test_mistakes_are_found_before_a_file_is_written(url: str, data: Path, tmp_path: Path, words: list[str], problem: str, hint: str):
    with pytest.raises(UserError) as caught:
        fit(data, tmp_path / "run", *(word.format(url=url) for word in words))
    assert problem in str(caught.value)
    assert hint in str(caught.value)
    assert "secret" not in str(caught.value).replace("secrets", "")
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------- servers that fail


def entry(token: int, *others: tuple[int, float], text: str | None = None, logp: Any = -1.0) -> dict[str, Any]:
    entries = {str(token): {"logprob": logp, "rank": 1, "decoded_token": text or chr(token)}}
    return entries | {str(t): {"logprob": p, "rank": 2, "decoded_token": chr(t)} for t, p in others}


def answer(change: Callable[[list[Any]], Any] = lambda places: None, ids: list[int] = IDS) -> tuple[int, dict[str, str], Any]:
    places: list[Any] = [None, *(entry(token, (65, -2.0), (66, -3.0)) for token in ids[1:])]
    change(places)
    return 200, {}, {"choices": [{"text": "", "prompt_logprobs": places}]}


@pytest.fixture
def scripted_server() -> Iterator[Callable[..., tuple[Endpoint, list[dict[str, Any]], list[float]]]]:
    """A server that gives these answers in turn, the last one forever: its endpoint, what it was asked, and the seconds waited."""
    servers = []

    def start(*script: tuple[int, dict[str, str], Any]) -> tuple[Endpoint, list[dict[str, Any]], list[float]]:
        requests: list[dict[str, Any]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                requests.append({"path": self.path, "body": body, "key": self.headers.get("Authorization")})
                code, headers, reply = script[min(len(requests), len(script)) - 1]
                content = (reply if isinstance(reply, str) else json.dumps(reply)).encode()
                self.send_response(code)
                for name, value in {"Content-Length": str(len(content)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: Any) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        waits: list[float] = []
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        return Endpoint(url, "tiny", load_tokenizer("byte"), waits.append), requests, waits

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_the_rest_is_what_the_named_tokens_leave(scripted_server: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ARGOSY_TEACHER_KEY", "hidden-key")
    endpoint, requests, _ = scripted_server(answer())
    targets = endpoint.top(IDS, 2, 258)
    assert targets.ids.tolist() == [[ord("n"), 65], [ord("c"), 65], [ord("e"), 65]]
    np.testing.assert_allclose(targets.logps, [[-1, -2]] * 3)
    np.testing.assert_allclose(targets.rest, np.log(1 - np.exp(-1) - np.exp(-2)), rtol=1e-6)
    assert requests[0]["path"] == "/v1/completions"
    assert requests[0]["key"] == "Bearer hidden-key"
    assert requests[0]["body"]["prompt"] == IDS


def test_errors_that_may_pass_are_tried_again_and_told_in_the_end(scripted_server: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "hidden-key")
    busy, broken = (429, {"Retry-After": "7"}, "slow down"), (503, {}, "no")
    endpoint, requests, waits = scripted_server(busy, broken, (200, {}, "{"), answer())
    assert len(endpoint.top(IDS, 2, 258).ids) == 3
    assert waits == [7.0, WAITS_S[1], WAITS_S[2]]
    endpoint, requests, waits = scripted_server((500, {}, {"error": {"message": "your key hidden-key is fine, I am not"}}))
    with pytest.raises(ArgosyError) as caught:
        endpoint.top(IDS, 2, 258)
    assert "after 6 tries: HTTP 500: your key [key] is fine" in str(caught.value)
    assert len(requests) == 6
    assert waits == list(WAITS_S)
    nobody = replace(endpoint, url="http://127.0.0.1:9/v1")
    with pytest.raises(ArgosyError, match=r"does not answer after 6 tries: .*refused"):
        nobody.top(IDS, 2, 258)


@pytest.mark.parametrize(
    ("reply", "error", "problem"),
    [
        ((401, {}, {"error": {"message": "who are you"}}), BadInput, "HTTP 401: who are you"),
        ((302, {"Location": "http://example.com"}, ""), BadInput, "HTTP 302"),
        ((200, {}, {"choices": [{"text": "x", "logprobs": None}]}), BadInput, "answers without `prompt_logprobs`"),
        (answer(ids=IDS[:-1]), BadInput, "gives 3 log-probabilities for a prompt of 4 tokens"),
        (answer(lambda p: p.__setitem__(1, entry(ord("x"), (65, -2.0)))), BadInput, "does not name token 110"),
        (answer(lambda p: p.__setitem__(1, entry(ord("n"), (65, -2.0), text="z"))), BadInput, "token 110 is `z`"),
        (answer(lambda p: p.__setitem__(1, entry(ord("n"), (300, -2.0)))), BadInput, "token 300 is"),
        (answer(lambda p: p.__setitem__(2, entry(ord("c"), (65, -2.0), logp=float("nan")))), ArgosyError, "log-probability nan"),
        (answer(lambda p: p.__setitem__(2, entry(ord("c"), (65, -2.0), logp=None))), ArgosyError, "log-probability None"),
        (answer(lambda p: p.__setitem__(2, entry(ord("c")))), BadInput, "names 1 tokens of a place, not 2"),
    ],
)
def test_what_is_no_teacher_is_refused(scripted_server: Any, reply: Any, error: type[Exception], problem: str):
    endpoint, requests, waits = scripted_server(reply)
    with pytest.raises(error, match=problem):
        endpoint.top(IDS, 2, 258)
    assert len(requests) == 1
    assert not waits


def test_only_documents_with_targets_are_asked_up_to_the_last_of_these():
    tokens = np.arange(10, 20, dtype=np.int32)[None]
    batch = {
        "tokens": tokens,
        "targets": tokens + 1,
        "segments": np.array([[1, 1, 1, 1, 2, 2, 3, 3, 3, 0]]),
        "mask": np.array([[0, 1, 0, 0, 0, 0, 1, 0, 1, 0]], np.float32),
    }
    first, second = texts(batch, 0)
    assert (first[0].tolist(), first[1]) == ([0, 1], [10, 11, 12])
    assert (second[0].tolist(), second[1]) == ([6, 7, 8], [16, 17, 18, 19])


def test_waits_and_words():
    assert retry_delay(None, 2.0) == 2.0
    assert retry_delay("1000", 2.0) == 60.0
    assert retry_delay("soon", 2.0) == 2.0
    assert retry_delay("5", None) is None
    assert message_of('{"message": "m"}') == "m"
    assert message_of("<html>\n no </html>") == "<html> no </html>"
    assert message_of("") == "no words"
