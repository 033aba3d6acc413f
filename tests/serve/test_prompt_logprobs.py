"""Log-probabilities of prompts: the model's own, on both routes, whole and streamed, beside answers that run."""

import asyncio
import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import httpx
import jax
import numpy as np
import pytest
from helpers import default
from serve.conftest import LIMITS, SIZES, alone, inside, serving

from argosy.infer import prompt_logprobs as prompts_module
from argosy.infer.engine.request import Request
from argosy.infer.lm import LM
from argosy.infer.prompt_logprobs import PASS, PromptScorer
from argosy.models import FAMILIES
from argosy.serve import run
from argosy.serve.app import App
from argosy.serve.service import Service
from argosy.serve.settings import ServeSettings
from argosy.web.errors import ApiError
from argosy.weights.build import random_model

PROMPT = "It was a dark"
Ask = Callable[..., httpx.Response]


def truth(lm: LM, ids: list[int]) -> np.ndarray:
    """The log-probabilities of all tokens at each place of a sequence, from its second on: [S V]."""
    return np.asarray(jax.nn.log_softmax(lm.logits([ids])[0, :-1], -1))


def completion(ask: Ask, **body: Any) -> dict[str, Any]:
    answer = ask("POST", "/v1/completions", json={"prompt": PROMPT, "temperature": 0} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(ask: Ask, **body: Any) -> list[dict[str, Any]]:
    text = ask("POST", "/v1/completions", json={"prompt": PROMPT, "temperature": 0, "stream": True} | body).text
    return [json.loads(part.removeprefix("data: ")) for part in text.split("\n\n")[:-2]]


def check(lm: LM, ids: list[int], logprobs: dict[str, Any], top: int) -> None:
    """Checks the first tokens of `logprobs` against the model."""
    expected, count = truth(lm, ids), len(ids)
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    log_probs = [row[token] for row, token in zip(expected, ids[1:])]
    np.testing.assert_allclose(logprobs["token_logprobs"][1:count], log_probs, rtol=1e-4, atol=1e-5)
    for row, token, names in zip(expected, ids[1:], logprobs["top_logprobs"][1:count]):
        # Several bytes that are no character have one name.
        likeliest = [lm.tokenizer.piece(int(i), False).decode("utf-8", "replace") for i in np.argsort(-row)[:top]]
        assert set(names) == {*likeliest, lm.tokenizer.piece(token, False).decode("utf-8", "replace")}


def test_echo_with_logprobs_is_the_prompt_then_the_answer(lm: LM, ask: Ask):
    document = completion(ask, echo=True, logprobs=3, max_tokens=4)
    choice, logprobs = document["choices"][0], document["choices"][0]["logprobs"]
    answer = alone(lm, PROMPT, 4)
    assert choice["text"] == PROMPT + answer.text
    assert {len(values) for values in logprobs.values()} == {len(PROMPT) + 4}
    check(lm, list(PROMPT.encode()), logprobs, 3)
    np.testing.assert_allclose(logprobs["token_logprobs"][-4:], answer.logprobs, rtol=1e-4)
    assert logprobs["tokens"][: len(PROMPT)] == list(PROMPT)
    assert logprobs["text_offset"][: len(PROMPT) + 1] == list(range(len(PROMPT) + 1))
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])


def test_no_tokens_but_the_prompts(lm: LM, ask: Ask):
    document = completion(ask, prompt=[PROMPT, "b", "a" * 60], echo=True, logprobs=0, max_tokens=0, n=2)
    assert [c["text"] for c in document["choices"]] == [prompt for prompt in (PROMPT, "b", "a" * 60) for _ in range(2)]
    assert {c["finish_reason"] for c in document["choices"]} == {"length"}
    assert document["usage"]["completion_tokens"] == 0
    assert document["usage"]["prompt_tokens"] == 74
    for choice in document["choices"]:
        check(lm, list(choice["text"].encode()), choice["logprobs"], 0)
        assert len(choice["logprobs"]["tokens"]) == len(choice["text"])
    assert completion(ask, echo=True, max_tokens=0)["choices"][0]["logprobs"] is None


def test_a_prompt_may_fill_the_context_if_nothing_follows(lm: LM):
    with serving(lm, LIMITS.model_copy(update={"prompt_logprobs_tokens": 4096})) as service:
        def ask(method: str, path: str, **kwargs: Any) -> httpx.Response:
            return inside(App(service).asgi, lambda client: client.request(method, path, **kwargs))

        document = completion(ask, prompt="a" * 128, echo=True, logprobs=0, max_tokens=0)["choices"][0]
        check(lm, [97] * 128, document["logprobs"], 0)
        assert ask("POST", "/v1/completions", json={"prompt": "a" * 129, "echo": True, "max_tokens": 0}).status_code == 400


def test_a_stream_with_echo_joins_to_the_whole_answer(ask: Ask):
    for tokens in (0, 4):
        fields = {"prompt": [PROMPT, "b"], "echo": True, "logprobs": 2, "max_tokens": tokens}
        whole, chunks = completion(ask, **fields)["choices"], events(ask, **fields)
        for choice in whole:
            mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
            assert "".join(c["text"] for c in mine) == choice["text"]
            assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]
            for name, values in choice["logprobs"].items():
                joined = [v for c in mine for v in c["logprobs"][name]]
                if name in ("tokens", "text_offset"):
                    assert joined == values


def test_offsets_are_places_in_the_text(ask: Ask):
    # Two bytes a character, an id beyond the bytes that is no text, and text behind it.
    ids = [*"hé".encode(), 257, *b"lo"]
    hidden = completion(ask, prompt=ids, echo=True, logprobs=0, max_tokens=0)["choices"][0]
    assert hidden["text"] == "hélo"
    assert hidden["logprobs"]["text_offset"] == [0, 1, 1, 2, 2, 3]
    special_shown = completion(ask, prompt=ids, echo=True, logprobs=0, max_tokens=0, skip_special_tokens=False)["choices"][0]
    special = special_shown["logprobs"]["tokens"][3]
    assert special_shown["text"] == f"hé{special}lo"
    assert special_shown["logprobs"]["text_offset"] == [0, 1, 1, 2, 2 + len(special), 3 + len(special)]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_prompt_logprobs_have_vllms_shape(lm: LM, ask: Ask, path: str):
    talk = path.endswith("chat/completions")
    prompt_fields = {"messages": [{"role": "user", "content": "hi"}]} if talk else {"prompt": PROMPT}
    text = "<user>hi<assistant>" if talk else PROMPT
    answer = ask("POST", path, json=prompt_fields | {"prompt_logprobs": 2, "max_tokens": 2, "temperature": 0}).json()
    assert "text_offset" not in (answer["choices"][0]["logprobs"] or {})
    document = (answer if talk else answer["choices"][0])["prompt_logprobs"]
    ids = list(text.encode())
    assert len(document) == len(ids)
    assert document[0] is None
    for row, token, entries in zip(truth(lm, ids), ids[1:], document[1:]):
        order = np.argsort(-row)
        assert next(iter(entries)) == str(token)
        assert set(entries) == {str(token), *(str(i) for i in order[:2])}
        for token_id, entry in entries.items():
            assert entry["logprob"] == pytest.approx(row[int(token_id)], rel=1e-4, abs=1e-5)
            assert entry["rank"] == 1 + int((row > row[int(token_id)]).sum())
            assert entry["decoded_token"] == lm.tokenizer.piece(int(token_id), False).decode("utf-8", "replace")
    assert "prompt_logprobs" not in ask("POST", path, json=prompt_fields | {"max_tokens": 2}).json()


@pytest.mark.slow
def test_running_answers_go_on_between_passes(lm: LM, service: Service):
    """One pass between two steps, however many prompts wait."""
    front, order = service.front, []
    front.prompts.compile(front.prompts.sizes())
    step, score = front.engine.step, front.prompts.score

    def scored(prompts: Any, adapter: Any) -> Any:
        order.append("pass")
        assert len(prompts) * max(map(len, prompts)) <= PASS
        return score(prompts, adapter)

    front.engine.step = lambda: (order.append("step"), step())[1]  # pyright: ignore[reportAttributeAccessIssue]
    front.prompts.score = scored  # pyright: ignore[reportAttributeAccessIssue]
    prompts = [list(bytes([97 + i]) * (20 + i)) for i in range(44)]

    async def go() -> tuple[list[int | None], list[Any]]:
        requests = [Request(list(PROMPT.encode()), 60, stop_tokens=frozenset())]
        async with front.open(requests, prompts) as answers:
            tokens = [event.token async for _, event in answers]
            return tokens, await answers.scored()

    try:
        tokens, scores = asyncio.run(go())
    finally:
        del front.engine.step, front.prompts.score
    assert tokens == alone(lm, PROMPT, 60, ends=frozenset()).tokens
    for ids, prompt_score in zip(prompts, scores):
        np.testing.assert_allclose(prompt_score.logprobs, [r[t] for r, t in zip(truth(lm, ids), ids[1:])], rtol=1e-4, atol=1e-5)
    assert 3 < order.count("pass") < 44, "prompts of one length share passes"
    while_running = order[: [i for i, kind in enumerate(order) if kind == "step"][60]]
    assert all("step" in two for two in pairwise(while_running))


def test_nothing_compiles_after_the_sizes_are(lm: LM):
    prompts = PromptScorer(lm.module, 128)
    sizes = list(prompts.sizes())
    assert sizes == [(1, 32), (8, 32), (1, 48), (4, 48), (1, 64), (4, 64), (1, 96), (2, 96), (1, 128), (2, 128)]
    assert prompts.compile(sizes[:4]) == 4
    rows = [[97] * n for n in (2, 33, 34, 49)]
    assert not prompts.missing(rows)
    assert prompts.missing([[97] * 50]) == {(1, 64)}
    for batch in ([rows[0]], [rows[1]] * 5, [rows[3]] * 4):
        prompts.score(batch)
    assert prompts.compilations == 4
    assert prompts.batch([rows[1]] * 20) == list(range(8))
    assert prompts.batch([rows[1]] * 4) == [0], "more than half of a batch"


@pytest.mark.parametrize(("family", "example"), default(("llama", "plain"), of=[("llama", "plain"), ("qwen3_next", "mixed")]))
def test_a_long_prompt_takes_several_passes_with_other_work_between_them(family: str, example: str, monkeypatch: pytest.MonkeyPatch):
    """One pass of 1,024 tokens of SmolLM2 stopped all running answers for ten seconds."""
    monkeypatch.setattr(prompts_module, "PASS", 16)
    config = FAMILIES[family].examples()[example]
    of = LM(config, random_model(config, 0).module)
    long, other = ([i * k % 97 for i in range(1, 60)] for k in (5, 7))
    prompts = PromptScorer(of.module, 96)
    assert prompts.compile(prompts.sizes_of([long])) == 1
    for ids in (long, other):
        if ids is other:  # begun and left: of it nothing remains
            assert prompts.score([long]) is None
            prompts.forget([long])
            assert prompts._long is None
        document = [prompts.score([ids]) for _ in range(4)]
        assert document[:3] == [None] * 3
        (score,) = document[3]
        rows = truth(of, ids)
        np.testing.assert_allclose(score.logprobs, [r[t] for r, t in zip(rows, ids[1:])], rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(score.ids[:, 0], rows.argmax(-1))
    assert prompts.compilations == 1


def test_what_is_compiled_for_a_request_is_counted(lm: LM):
    with serving(lm) as service:
        front = service.front
        front.metrics.text()

        def ask(method: str, path: str, **kwargs: Any) -> httpx.Response:
            return inside(App(service).asgi, lambda client: client.request(method, path, **kwargs))

        for expected in (1, 1):
            completion(ask, echo=True, logprobs=0, max_tokens=0)
            assert front.prompts.compilations == expected
        assert 'argosy:compilations_total{engine="0",model_name="tiny"} 1.0' in front.metrics.text().decode()


def test_a_pass_that_fails_ends_its_request_alone(service: Service, ask: Ask):
    front = service.front

    def broken(prompts: Any) -> Any:
        raise RuntimeError("no memory")

    front.prompts.score = broken  # pyright: ignore[reportAttributeAccessIssue]
    try:
        answer = ask("POST", "/v1/completions", json={"prompt": PROMPT, "echo": True, "logprobs": 0, "max_tokens": 2})
    finally:
        del front.prompts.score
    assert answer.status_code == 500
    assert "memory" not in answer.text
    assert completion(ask, max_tokens=2)["usage"]["completion_tokens"] == 2
    assert (front.waiting, front.waiting_tokens, front._unscored, front._scores) == (0, 0, [], {})


def test_leaving_forgets_the_prompts(service: Service):
    front = service.front

    async def go() -> None:
        async with front.open([], [[97] * 30] * 50):
            pass
        while not front._tasks.empty():
            await asyncio.sleep(0.01)

    asyncio.run(go())
    assert (front.waiting, front.waiting_tokens, front._scores) == (0, 0, {})
    assert len(front._unscored) == 0


def test_a_server_that_ends_says_so_to_who_waits_for_scores(lm: LM):
    async def go() -> None:
        with serving(lm) as service:
            front = service.front
            async with front.open([], [[97] * 30]) as answers:
                answers.fail(ApiError("the server is shutting down", status=503))
                with pytest.raises(ApiError, match="shutting down"):
                    await answers.scored()

    asyncio.run(go())


def test_programs_of_the_warm_up_are_not_counted_as_compiled_later(lm: LM):
    limits = LIMITS.model_copy(update={"prompt_logprobs_tokens": 33})
    serve_settings = ServeSettings(warm_up=False, warm_up_prompt_logprobs=True, engine=SIZES, limits=limits)
    service = run.build_service(lm, "tiny", serve_settings, None)
    try:
        assert service.front.prompts.compilations == 4
        assert 'argosy:compilations_total{engine="0",model_name="tiny"} 0.0' in service.front.metrics.text().decode()
    finally:
        service.front.close()
