"""Several copies of a model behind one server: who answers, that all of them answer alike, and that they change and end together."""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serve.conftest import LIMITS, SIZES, alone, inside
from serve.test_admin import KEY, LORA, factors_of
from serve.test_front import PROMPT, breaks, tokens, until_settled

from argosy.core.errors import BadInput
from argosy.infer.engine.engine import Engine
from argosy.infer.engine.replicas import model_copies
from argosy.infer.engine.request import Request
from argosy.infer.lm import LM
from argosy.infer.sampling.sample import Sampling
from argosy.serve import run
from argosy.serve.admin import Admin
from argosy.serve.app import App
from argosy.serve.engine import replicas
from argosy.serve.engine.front import Front
from argosy.serve.engine.replicas import ReplicaFront, RequestGroup
from argosy.serve.metrics import EngineMetrics
from argosy.serve.service import Service
from argosy.serve.settings import AdminSettings, ServerLimits, ServeSettings
from argosy.web.errors import ApiError
from argosy.weights.build import random_model
from argosy.weights.peft.writer import write_adapter


def forever(n: int = 1) -> list[Request]:
    """Requests that run until the context is full, and share no prefix."""
    return [Request([i, *PROMPT], 90) for i in range(n)]


@contextmanager
def serving(lm: LM, count: int, limits: ServerLimits = LIMITS, sizes: Any = SIZES) -> Iterator[Service]:
    """A service of several copies, whose threads end with the block, and with no page in use."""
    engines = [Engine(module, sizes) for module in model_copies(random_model(lm.config, 0).module, count)]
    front = ReplicaFront([Front(engine, limits, EngineMetrics("tiny", engine, i)) for i, engine in enumerate(engines)], limits)
    front.start()
    try:
        yield Service(lm, "tiny", front, limits, {"temperature": 1.0}, Random(0))
    finally:
        front.close()
    if not front.failed:
        assert [engine.pages.used for engine in engines] == [0] * count
        assert front.queue == (0, 0)
        assert [copy.load for copy in front.fronts] == [0] * count


@pytest.fixture(scope="module")
def shared_service(lm: LM) -> Iterator[Service]:
    with serving(lm, 3) as service:
        yield service


@pytest.fixture
def service(shared_service: Service) -> Iterator[Service]:
    """Three copies, as new for each test: nothing cached, and the first one's turn."""
    yield shared_service
    front: Any = shared_service.front
    asyncio.run(until_rested(front))
    front._turn = 0
    for engine in front.engines:
        assert engine.reset_prefix_cache()


@pytest.fixture
def front(service: Service) -> ReplicaFront:
    assert isinstance(service.front, ReplicaFront)
    return service.front


def drawn_tokens(front: ReplicaFront) -> list[int]:
    return [engine.stats.drawn_tokens for engine in front.engines]


def open_counts(front: ReplicaFront) -> list[int]:
    """The open requests of each copy."""
    return [len(copy.opened) for copy in front.fronts]


async def until_rested(front: ReplicaFront) -> None:
    for copy in front.fronts:
        await until_settled(copy)


# ---------------------------------------------------------------- answers


@pytest.mark.slow
def test_an_answer_does_not_depend_on_the_copy(lm: LM, front: ReplicaFront):
    sampling = Sampling(temperature=0.9, top_k=50)

    async def go() -> list[list[int]]:
        outputs = []
        for _ in range(3):
            async with front.open([Request(PROMPT, 12, sampling, seed=7)]) as answers:
                outputs.append((await tokens(answers))[0])
            await until_rested(front)
            await front.together(lambda engines: [engine.reset_prefix_cache() for engine in engines])
        return outputs

    before = drawn_tokens(front)
    expected = alone(lm, PROMPT, 12, seed=7, ends=frozenset(), temperature=0.9, top_k=50).tokens
    assert asyncio.run(go()) == [expected] * 3
    assert [now > then for now, then in zip(drawn_tokens(front), before)] == [True] * 3, "each copy has answered once"


def completion(client: httpx.AsyncClient, prompt: Any, **fields: Any) -> Any:
    return client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 6, "temperature": 0, **fields})


ASKED = {"n": 2, "logprobs": 2, "echo": True, "seed": 3, "return_token_ids": True}


@pytest.mark.slow
def test_prompts_of_one_request_are_spread_and_answered_in_their_order(service: Service, front: ReplicaFront):
    texts = ["It was", "a dark", "and stormy", "night; the"]

    async def go(client: httpx.AsyncClient) -> Any:
        before = drawn_tokens(front)
        whole = (await completion(client, texts, **ASKED)).json()
        grown = [now - then for now, then in zip(drawn_tokens(front), before)]
        single = [(await completion(client, text, **ASKED)).json()["choices"] for text in texts]
        return whole, grown, single

    whole, grown, single = inside(App(service).asgi, go)
    assert all(grown), f"tokens of each copy: {grown}"
    assert [choice["index"] for choice in whole["choices"]] == list(range(8))
    for choice, expected in zip(whole["choices"], [choice for choices in single for choice in choices], strict=True):
        assert choice["text"] == expected["text"]
        assert choice["token_ids"] == expected["token_ids"]
        np.testing.assert_allclose(choice["logprobs"]["token_logprobs"][1:], expected["logprobs"]["token_logprobs"][1:], rtol=1e-4)
    assert whole["usage"]["completion_tokens"] == 48


def test_a_stream_of_spread_prompts_has_every_answer_and_stop_strings_end_theirs(service: Service):
    async def go(client: httpx.AsyncClient) -> Any:
        whole = (await completion(client, [[65], [66], [67]])).json()["choices"]
        stop = next(text[2] for text in (choice["text"] for choice in whole) if len(text) > 3)
        fields = {"stop": [stop]}
        whole = (await completion(client, [[65], [66], [67]], **fields)).json()["choices"]
        text = (await completion(client, [[65], [66], [67]], stream=True, **fields)).text
        return whole, text

    whole, text = inside(App(service).asgi, go)
    chunks = [json.loads(line[6:])["choices"][0] for line in text.splitlines() if line.startswith("data: {")]
    for place, choice in enumerate(whole):
        mine = [chunk for chunk in chunks if chunk["index"] == place]
        assert "".join(chunk["text"] for chunk in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
    assert "stop" in {choice["finish_reason"] for choice in whole}


# ---------------------------------------------------------------- routing


def test_answers_to_one_prompt_stay_on_one_copy(front: ReplicaFront):
    async def go() -> list[list[int]]:
        prompt = [*PROMPT]
        counts = []
        for _ in range(2):
            async with front.open([Request(prompt, 30, seed=i) for i in range(3)]) as answers:
                await anext(answers)
                counts.append(sorted(sum(not row.done for row in stream.rows) for f in front.fronts for stream in f.opened))
            await until_rested(front)
        return counts

    assert asyncio.run(go()) == [[3], [3]]


def _shares(front: ReplicaFront, request: Request) -> Any:
    return front._shares([request], (), front._page_hashes([request]), whole=False)


def test_a_long_prompt_is_hashed_beside_the_event_loop(front: ReplicaFront, monkeypatch: pytest.MonkeyPatch):
    """For as long as hashing takes, here until the loop has made a turn of its own."""
    turned = threading.Event()
    hashes_of = replicas.page_hashes

    def slowly(*rest: Any) -> Any:
        assert turned.wait(30), "the event loop waits"
        return hashes_of(*rest)

    monkeypatch.setattr(replicas, "page_hashes", slowly)

    async def go() -> Any:
        hashing = asyncio.create_task(front._hashes([Request([1] * (replicas.FEW_TOKENS + 1), 1)]))
        await asyncio.sleep(0.01)
        turned.set()
        return await hashing

    [hashes] = asyncio.run(go()).values()
    assert hashes == hashes_of([1] * replicas.FEW_TOKENS, front.engine.settings.page)


def test_a_request_goes_to_the_least_busy_copy_and_waiting_counts_fourfold(front: ReplicaFront):
    async def go() -> list[list[int]]:
        loads = []
        async with front.open(forever(3)[:1]), front.open(forever(3)[1:2]):
            async with front.open(forever(3)[2:]):
                loads.append(open_counts(front))
            async with front.open(forever(4)[3:]):
                loads.append(open_counts(front))
        return loads

    assert asyncio.run(go()) == [[1, 1, 1], [1, 1, 1]], "the third has ended: its copy is idle again"
    first, second, third = front.fronts
    try:
        first.waiting, second.running, third.running = 1, 3, 5
        assert [copy.load for copy in front.fronts] == [4, 3, 5]
        assert list(_shares(front, Request([3, 3], 1))) == [second]
    finally:
        first.waiting, second.running, third.running = 0, 0, 0


def test_a_cached_prefix_outweighs_one_waiting_sequence_and_no_more(front: ReplicaFront):
    async def go() -> None:
        async with front.open([Request(PROMPT, 1)]) as answers:
            await tokens(answers)

    asyncio.run(go())
    first, second, third = front.fronts
    shares = []
    try:
        for first.running, second.running, third.running in ((7, 3, 5), (8, 3, 5)):
            shares += _shares(front, Request([*PROMPT, 1], 1))
    finally:
        first.running, second.running, third.running = 0, 0, 0
    assert shares == [first, second]


def test_a_conversation_finds_its_cached_prefix_and_others_take_turns(front: ReplicaFront):
    prompts = [[*PROMPT, *[token] * 8] for token in (1, 2, 3)]
    # Salted, so that they share nothing.
    salts = ["a", "b", "c"]

    async def turn(ids: list[int], salt: str) -> tuple[int, int]:
        async with front.open([Request(ids, 4, salt=salt)]) as answers:
            [number] = [i for i, copy in enumerate(front.fronts) if copy.opened]
            await tokens(answers)
            return number, answers.reused(0)

    async def go() -> list[list[tuple[int, int]]]:
        first = [await turn(ids, salt) for ids, salt in zip(prompts, salts)]
        # In another order, after which round robin alone would choose other copies.
        again = [await turn([*ids, 5, 6], salt) for ids, salt in list(zip(prompts, salts))[::-1]]
        return [first, again[::-1]]

    first, again = asyncio.run(go())
    assert [number for number, _ in first] == [0, 1, 2]
    assert [reused for _, reused in first] == [0, 0, 0]
    assert [number for number, _ in again] == [0, 1, 2]
    assert [reused for _, reused in again] == [32, 32, 32]


def test_a_prefix_under_another_salt_attracts_nothing(front: ReplicaFront):
    async def go() -> list[int]:
        places = []
        for salt in ("a", "b", "a"):
            async with front.open([Request([*PROMPT], 2, salt=salt)]) as answers:
                places.append(next(i for i, copy in enumerate(front.fronts) if copy.opened))
                await tokens(answers)
        return places

    assert asyncio.run(go()) == [0, 1, 0]


# ---------------------------------------------------------------- limits, leaving, the end


def test_leaving_frees_the_pages_of_every_copy(front: ReplicaFront):
    async def go() -> None:
        async with front.open(forever(6)) as answers:
            await anext(answers)
            assert len(front.opened) == 1, "one request of one client"
            assert open_counts(front) == [1, 1, 1]
        assert not front.opened
        await until_rested(front)

    asyncio.run(go())
    assert [engine.pages.used for engine in front.engines] == [0, 0, 0]


def test_requests_are_aborted_by_name_with_what_they_have_on_all_copies(front: ReplicaFront):
    async def go() -> tuple[int, int, Counter[Any]]:
        async with front.open(forever(3), names=["x"]) as answers, front.open(forever(1), names=["y"]) as other:
            await anext(answers)
            missed, aborted = front.abort(["z"]), front.abort(["x"])
            reasons = Counter([event.finish_reason async for _, event in answers if event.finish_reason is not None])
            await anext(other)
        return missed, aborted, reasons

    assert asyncio.run(go()) == (0, 1, Counter({"abort": 3}))


@pytest.mark.parametrize("limits", [{"queue": 3}, {"queue_tokens": 3 * 31}])
def test_limits_count_the_sum_over_the_copies(front: ReplicaFront, limits: dict[str, Any]):
    old, front.limits = front.limits, front.limits.model_copy(update=limits)

    async def go() -> ApiError:
        await front.pause("keep")
        async with front.open(forever(2)), front.open(forever(1)):
            assert front.queue == (3, 93)
            with pytest.raises(ApiError) as error:
                async with front.open(forever(1)):
                    raise AssertionError("was admitted")
        await front.resume()
        return error.value

    try:
        error = asyncio.run(go())
    finally:
        front.limits = old
    assert (error.status, error.code) == (503, "queue_full")
    assert sum(copy.metrics.rejections._value.get() for copy in front.fronts) > 0


def test_all_prompts_of_a_request_are_admitted_or_none(front: ReplicaFront):
    async def go() -> None:
        with pytest.raises(ApiError, match="outside the model's vocabulary"):
            async with front.open([*forever(2), Request([9999], 5)]):
                raise AssertionError("was admitted")
        await until_rested(front)

    asyncio.run(go())
    assert front.queue == (0, 0)
    assert not any(copy._rows for copy in front.fronts)


@pytest.mark.slow
def test_a_drain_lets_every_copy_finish(lm: LM):
    with serving(lm, 2) as service:
        front = service.front

        async def go() -> list[int]:
            async with front.open(forever(2)) as answers:
                await anext(answers)
                draining = asyncio.create_task(front.drain(60))
                await asyncio.sleep(0)
                with pytest.raises(ApiError, match="shutting down"):
                    async with front.open(forever()):
                        raise AssertionError("was admitted")
                count = sum(map(len, (await tokens_of(answers)).values()))
            await draining
            return [count]

        assert asyncio.run(go()) == [179]


async def tokens_of(answers: Any) -> dict[int, list[int]]:
    tokens_by_place: dict[int, list[int]] = {}
    async for place, event in answers:
        tokens_by_place.setdefault(place, []).append(event.token)
    return tokens_by_place


def test_one_copy_that_dies_ends_the_answers_of_all(lm: LM, capsys: pytest.CaptureFixture[str]):
    """Half of a server that goes on would hide that the other half is gone."""
    with serving(lm, 2) as service:
        front: Any = service.front

        async def go(client: httpx.AsyncClient) -> list[Any]:
            outcomes = []
            async with front.open(forever(1)) as healthy:
                await anext(healthy)
                assert open_counts(front) == [1, 0]
                front.fronts[1].engine.step = breaks(2)
                async with front.open(forever(2)[1:]) as answers:
                    assert open_counts(front) == [1, 1]
                    with pytest.raises(ApiError) as error:
                        await tokens(answers)
                outcomes.append(error.value.code)
                with pytest.raises(ApiError) as error:
                    await tokens(healthy)
                outcomes.append(error.value.code)
            with pytest.raises(ApiError) as error:
                await front.together(len)
            outcomes.append(error.value.code)
            await until_settled(front.fronts[0])
            return [*outcomes, (await client.get("/health")).status_code, (await completion(client, "x")).status_code]

        assert inside(App(service).asgi, go) == ["engine_dead"] * 3 + [503, 503]
        assert front.fronts[0].engine.pages.used == 0
    assert "the device is gone" in capsys.readouterr().err


# ---------------------------------------------------------------- metrics


def test_each_copy_has_series_of_its_own_and_every_name_occurs_once(service: Service, front: ReplicaFront):
    async def go(client: httpx.AsyncClient) -> tuple[str, Any]:
        async with front.open(forever(3)) as answers:
            await anext(answers)
            text = (await client.get("/metrics")).text
            load = (await client.get("/load")).json()
        return text, load

    text, load = inside(App(service).asgi, go)
    assert load == {"server_load": 1}
    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    series = Counter((s.name, tuple(sorted(s.labels.items()))) for family in families for s in family.samples)
    assert max(series.values()) == 1
    for name in ("vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:generation_tokens", "argosy:compilations"):
        [family] = [candidate for candidate in families if candidate.name == name]
        engines = {s.labels["engine"] for s in family.samples if not s.name.endswith("_created")}
        assert engines == {"0", "1", "2"}, name
    running = next(candidate for candidate in families if candidate.name == "vllm:num_requests_running")
    waiting = next(candidate for candidate in families if candidate.name == "vllm:num_requests_waiting")
    assert sum(s.value for candidate in (running, waiting) for s in candidate.samples) == 3


# ---------------------------------------------------------------- changes


def test_no_copy_computes_while_something_changes_them_all(front: ReplicaFront):
    changing, stepped = threading.Event(), []
    steps = [engine.step for engine in front.engines]
    for engine, step in zip(front.engines, steps):
        engine.step = lambda step=step: (stepped.append(changing.is_set()), step())[1]  # pyright: ignore

    def change(engines: Sequence[Engine]) -> int:
        changing.set()
        # A thread that were not stopped would make steps meanwhile.
        threading.Event().wait(0.2)
        changing.clear()
        return len(engines)

    async def go() -> list[int]:
        async with front.open(forever(6)) as answers:
            await anext(answers)
            returned = await asyncio.gather(front.together(change), front.together(change))
            await anext(answers)
        return returned

    try:
        assert asyncio.run(go()) == [3, 3]
    finally:
        for engine in front.engines:
            del engine.step
    assert stepped
    assert not any(stepped)


@pytest.fixture(scope="module")
def root(lm: LM, tmp_path_factory: Any) -> Path:
    base = tmp_path_factory.mktemp("files")
    for name, seed in (("sql", 0), ("poet", 1)):
        write_adapter(base / name, lm.config, factors_of(lm.module, seed, 2))
    LM(lm.config, random_model(lm.config, 1).module).save(base / "next", format="hub")
    return base


@pytest.fixture(scope="module")
def adapted_service(lm: LM) -> Iterator[Service]:
    with serving(lm, 2, sizes=LORA) as service:
        yield service


def post(service: Service, root: Path) -> Callable[..., httpx.Response]:
    admin = Admin(service, AdminSettings(shared=True, key="secret", root=str(root)))
    app = App(service, admin=admin).asgi
    return lambda path, body=None: inside(app, lambda client: client.post(path, json=body, headers=KEY))


def on_each(front: Any, ids: list[int], adapter: str | None = None) -> list[list[int]]:
    """The greedy answer of each copy."""

    async def go() -> list[list[int]]:
        outputs = []
        for copy in front.fronts:
            async with copy.open([Request(ids, 6, adapter=adapter)]) as answers:
                outputs.append((await tokens(answers))[0])
        return outputs

    return asyncio.run(go())


@pytest.mark.slow
def test_adapters_and_weights_change_on_every_copy(lm: LM, adapted_service: Service, root: Path):
    say, front = post(adapted_service, root), adapted_service.front
    plain = on_each(front, [5, 6, 7])
    assert say("/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": "sql"}).status_code == 200
    with_adapter = on_each(front, [5, 6, 7], "sql")
    assert plain[0] == plain[1] != with_adapter[0] == with_adapter[1]
    assert say("/v1/unload_lora_adapter", {"lora_name": "sql"}).status_code == 200
    assert [engine.adapters.loaded for engine in front.engines] == [{}, {}]  # pyright: ignore
    old = [engine.weights() for engine in front.engines]
    for path, body in (
        ("/start_weight_update", None),
        ("/update_weights", {"update_info": {"path": "next"}}),
        ("/finish_weight_update", {"weight_version": "2"}),
    ):
        assert say(path, body).status_code == 200
    try:
        other = alone(LM(lm.config, random_model(lm.config, 1).module, lm.tokenizer), [5, 6, 7], 6, ends=frozenset()).tokens
        assert on_each(front, [5, 6, 7]) == [other, other]
        for i, engine in enumerate(front.engines):
            assert {device.id for a in engine.weights().values() for device in a.devices()} == {i}
    finally:
        for engine, weights in zip(front.engines, old):
            engine.swap_weights(weights)
    assert on_each(front, [5, 6, 7]) == plain


def test_an_adapter_is_loaded_on_all_copies_or_on_none(adapted_service: Service, root: Path):
    """The second copy has no place: an adapter that was unloaded there still answers, and another one is loaded."""
    say, front = post(adapted_service, root), adapted_service.front

    async def go() -> tuple[httpx.Response, list[list[str]]]:
        async with front.fronts[1].open([Request([1, 2], 80, adapter="sql")]) as answers:  # pyright: ignore
            await anext(answers)
            admin = Admin(adapted_service, AdminSettings(shared=True, key="secret", root=str(root)))
            transport = httpx.ASGITransport(App(adapted_service, admin=admin).asgi)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                await client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"}, headers=KEY)
                body = {"lora_name": "new", "lora_path": "poet"}
                refused = await client.post("/v1/load_lora_adapter", json=body, headers=KEY)
            return refused, [list(engine.adapters.loaded) for engine in front.engines]  # pyright: ignore

    for name in ("sql", "poet"):
        assert say("/v1/load_lora_adapter", {"lora_name": name, "lora_path": name}).status_code == 200
    refused, loaded = asyncio.run(go())
    say("/v1/unload_lora_adapter", {"lora_name": "poet"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_name")
    assert loaded == [["poet"], ["poet"]]


def test_metrics_name_the_adapters_of_all_copies_once(adapted_service: Service, root: Path):
    say, front = post(adapted_service, root), adapted_service.front
    for name in ("sql", "poet"):
        say("/v1/load_lora_adapter", {"lora_name": name, "lora_path": name})

    async def go() -> str:
        await front.pause("keep")
        async with front.open([Request([1, 2], 3, adapter="sql"), Request([3, 4], 3, adapter="poet")]):
            assert open_counts(front) == [1, 1]  # pyright: ignore
            text = front.metrics.text().decode()
        await front.resume()
        return text

    lines = [line for line in asyncio.run(go()).splitlines() if line.startswith("vllm:lora_requests_info{")]
    for name in ("sql", "poet"):
        say("/v1/unload_lora_adapter", {"lora_name": name})
    assert [line.split("}")[0] for line in lines] == [
        'vllm:lora_requests_info{max_lora="2",running_lora_adapters="",waiting_lora_adapters="poet,sql"'
    ]


def test_the_prefix_caches_are_cleared_on_all_copies_or_on_none(service: Service, front: ReplicaFront):
    async def go() -> tuple[Any, Any, list[bool], Any]:
        admin = Admin(service, AdminSettings(shared=True, key="secret"))
        transport = httpx.ASGITransport(App(service, admin=admin).asgi)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=KEY) as client:
            async with front.open([Request([*PROMPT], 2)]) as answers:
                await tokens(answers)
            async with front.open(forever(1), names=["x"]) as answers:
                await anext(answers)
                busy = (await client.post("/reset_prefix_cache")).json()
                cached = [bool(engine.pages._page_of) for engine in front.engines]
                paused = (await client.post("/pause?mode=keep")).json()
                rests = front.paused and [copy.paused for copy in front.fronts] == [True] * 3
                await client.post("/resume")
            await until_rested(front)
            return busy, paused, cached, [rests, (await client.post("/reset_prefix_cache")).json()]

    busy, paused, cached, after = asyncio.run(go())
    assert (busy, paused) == ({"success": False}, {"status": "paused"})
    assert any(cached)
    assert after == [True, {"success": True}]
    assert not any(engine.pages._page_of for engine in front.engines)


def test_a_pause_that_waits_lets_every_copy_finish(front: ReplicaFront):
    async def go() -> list[int]:
        async with front.open([Request([*PROMPT, i], 20) for i in range(3)]) as answers:
            await anext(answers)
            await front.pause("wait")
            assert front.paused
            answers_tokens = await tokens_of(answers)
        await front.resume()
        assert not front.paused
        return [sum(map(len, answers_tokens.values()))]

    assert asyncio.run(go()) == [59]


# ---------------------------------------------------------------- the command


def test_a_server_of_two_copies_is_made_of_its_settings(lm: LM):
    serve_settings = ServeSettings(copies=2, warm_up=False, engine=SIZES, limits=LIMITS)
    own_lm = LM(lm.config, random_model(lm.config, 0).module, lm.tokenizer)
    service = run.build_service(own_lm, "tiny", serve_settings, None)
    try:
        assert [{d.id for d in engine.runner.devices} for engine in service.front.engines] == [{0}, {1}]
        assert "cache: 2 copies with 512 tokens of 4 sequences of at most 128" in service.about[1]
        assert on_each(service.front, [5, 6, 7])[0] == on_each(service.front, [5, 6, 7])[1]
    finally:
        service.front.close()


def test_too_few_devices_are_a_mistake_before_the_model_is_read():
    with pytest.raises(BadInput, match="this process has 8 devices"):
        run.check_server(ServeSettings(copies=5, tensor=2))
    run.check_server(ServeSettings(copies=4, tensor=2))


def test_copies_of_an_encoder_are_refused():
    config = type("Config", (), {"causal": False, "scored": False, "inputs": "tokens"})
    lm: Any = type("Encodes", (), {"config": config, "companions": None})
    with pytest.raises(BadInput, match="copies of an encoder"):
        run.running_server(lm, "bert", ServeSettings(copies=2), None)


def test_a_prompt_loads_a_copy_by_its_completions_and_its_scores():
    assert RequestGroup([0, 1], [0]).load == 3 * RequestGroup([2], []).load
