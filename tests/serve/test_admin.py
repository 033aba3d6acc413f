"""The admin routes: adapters, pauses and new weights while a server answers."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx
import numpy as np
import pytest
from serve.conftest import LIMITS, SIZES, inside

from argosy.adapt.surgery import find
from argosy.core.errors import BadInput
from argosy.core.formats import TensorEntry
from argosy.core.formats.files import write_file
from argosy.core.formats.safetensors import tensors_file
from argosy.infer.engine.engine import Engine
from argosy.infer.engine.request import Request
from argosy.infer.lm import LM
from argosy.models.parts.stack.addresses import to_layers
from argosy.models.parts.weight import split
from argosy.serve import run
from argosy.serve.admin import Admin
from argosy.serve.app import App, admin_app
from argosy.serve.engine.front import Front
from argosy.serve.metrics import EngineMetrics
from argosy.serve.service import Service
from argosy.serve.settings import AdminSettings, ServeSettings
from argosy.web.errors import ApiError
from argosy.web.process import bound_socket
from argosy.weights.build import random_model
from argosy.weights.peft.attach import put_adapter
from argosy.weights.peft.sites import Adapter
from argosy.weights.peft.writer import write_adapter

KEY = {"authorization": "Bearer secret"}
LORA = SIZES.model_copy(update={"lora": SIZES.lora.model_copy(update={"enabled": True, "adapters": 2, "rank": 4})})


def factors_of(module: Any, seed: int, rank: int) -> dict[str, Adapter]:
    rng = np.random.default_rng(seed)
    out = {}
    for name, of in find(module, r"layers\..*attn\.(q|o)").items():
        outer = "".join(letter for letter in of.spec if letter in of.out)
        a, b = ([(of.sizes | {"r": rank})[letter] for letter in letters] for letters in (of.inner + "r", "r" + outer))
        out[name] = Adapter(*(rng.standard_normal(shape).astype(np.float32) for shape in (a, b)), 0.5)
    return out


@pytest.fixture(scope="module")
def other(lm: LM) -> LM:
    """The same model with other weights."""
    return LM(lm.config, random_model(lm.config, 1).module)


@pytest.fixture(scope="module")
def root(lm: LM, other: LM, tmp_path_factory: Any) -> Path:
    """The allowed folder, beside one that is not."""
    base = tmp_path_factory.mktemp("files")
    for name, seed, rank in (("sql", 0, 2), ("poet", 1, 4), ("large", 2, 5)):
        write_adapter(base / "root" / name, lm.config, factors_of(lm.module, seed, rank))
    write_adapter(base / "secret", lm.config, factors_of(lm.module, 0, 2))
    os.symlink(base / "secret", base / "root" / "link")
    (base / "root" / "inside").mkdir()
    for file in (base / "secret").iterdir():
        os.symlink(file, base / "root" / "inside" / file.name)
    os.symlink(base / "root" / "sql", base / "root" / "alias")
    (base / "root" / "empty").mkdir()
    other.save(base / "root" / "next", format="hub")
    leaves = to_layers(other.module, split(other.module)[1])
    part = [TensorEntry(n, a.shape, a.dtype, lambda a=a: np.asarray(a)) for n, a in leaves.items() if n.startswith("layers.1.")]
    write_file(base / "root" / "part.safetensors", tensors_file("part.safetensors", part, {}))
    wide = lm.config.model_copy(update={"ffn": lm.config.ffn + 4})
    LM(wide, random_model(wide, 0).module).save(base / "root" / "wide", format="hub")
    return base / "root"


@contextmanager
def answering(lm: LM, sizes: Any = LORA) -> Iterator[Service]:
    engine = Engine(random_model(lm.config, 0).module, sizes)
    front = Front(engine, LIMITS, EngineMetrics("tiny", engine))
    front.start()
    try:
        yield Service(lm, "tiny", front, LIMITS, {"temperature": 0.0}, Random(0))
    finally:
        front.close()
    assert front.failure is None
    assert engine.pages.used == 0


@pytest.fixture(scope="module")
def shared(lm: LM) -> Iterator[Service]:
    with answering(lm) as service:
        yield service


@pytest.fixture
def service(shared: Service) -> Iterator[Service]:
    """One service for all tests, as it was before each."""
    old = shared.front.engine.weights()
    yield shared
    engine = shared.front.engine
    for name in list(engine.adapters.loaded):
        engine.unload_adapter(name)
    engine.swap_weights(old)
    shared.weight_version = "default"


@pytest.fixture
def ask(service: Service, root: Path) -> Callable[..., httpx.Response]:
    """`ask(path, body)`: one request to a server with admin routes on the main port."""
    admin = Admin(service, AdminSettings(shared=True, key="secret", root=str(root)))
    app = App(service, admin=admin).asgi

    def ask(path: str, body: Any = None, method: str = "", **options: Any) -> httpx.Response:
        async def send(client: httpx.AsyncClient) -> httpx.Response:
            return await client.request(method or ("GET" if body is None else "POST"), path, json=body, **{"headers": KEY, **options})

        return inside(app, send)

    return ask


def greedy_of(ask: Callable[..., httpx.Response], model: str) -> list[int]:
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
    answer = ask("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return answer.json()["choices"][0]["token_ids"]


def expected(lm: LM, seed: int | None, rank: int = 0) -> list[int]:
    module = random_model(lm.config, 0).module
    if seed is not None:
        put_adapter(module, factors_of(lm.module, seed, rank))
    return greedy(module, [5, 6, 7], 6)


def greedy(module: Any, ids: list[int], most: int) -> list[int]:
    lm, ids, start = LM(module.config, module), list(ids), len(ids)
    for _ in range(most):
        ids.append(int(lm.logits([ids])[0, -1].argmax()))
    return ids[start:]


# ---------------------------------------------------------------- adapters


@pytest.mark.slow
def test_an_adapter_is_loaded_named_and_unloaded(lm: LM, service: Service, ask: Callable):
    loaded = ask("/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": "sql"})
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    assert ask("/v1/load_lora_adapter", {"lora_name": "poet", "lora_path": "poet"}).status_code == 200
    cards = ask("/v1/models").json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [("tiny", None), ("sql", "tiny"), ("poet", "tiny")]
    assert ask("/v1/models/sql").json() == cards[1]
    completions = {name: greedy_of(ask, name) for name in ("tiny", "sql", "poet")}
    assert completions == {"tiny": expected(lm, None), "sql": expected(lm, 0, 2), "poet": expected(lm, 1, 4)}
    assert len(set(map(tuple, completions.values()))) == 3
    answer = ask("/v1/unload_lora_adapter", {"lora_name": "sql"})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    missing = ask("/v1/completions", {"model": "sql", "prompt": "x"})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    assert [card["id"] for card in ask("/v1/models").json()["data"]] == ["tiny", "poet"]


def test_an_adapter_is_replaced_in_place_only_where_asked(lm: LM, ask: Callable):
    body = {"lora_name": "one", "lora_path": "sql"}
    assert ask("/v1/load_lora_adapter", body).status_code == 200
    again = ask("/v1/load_lora_adapter", body | {"lora_path": "poet"})
    assert (again.status_code, again.json()["error"]["param"]) == (400, "lora_name")
    assert "load_inplace" in again.json()["error"]["message"]
    assert greedy_of(ask, "one") == expected(lm, 0, 2)
    assert ask("/v1/load_lora_adapter", body | {"lora_path": "poet", "load_inplace": True}).status_code == 200
    assert greedy_of(ask, "one") == expected(lm, 1, 4)


REFUSED = [
    ({"lora_name": "tiny", "lora_path": "sql"}, 400, "the model itself is called `tiny`"),
    ({"lora_name": "x"}, 400, "`lora_path` is missing"),
    ({"lora_name": "x", "lora_path": "sql", "is_3d_lora_weight": True}, 400, "is_3d_lora_weight"),
    ({"lora_name": "x", "lora_path": "empty"}, 400, "no adapter_config.json"),
    ({"lora_name": "x", "lora_path": "large"}, 400, "rank 5 is above the maximum of 4"),
    ({"lora_name": "x", "lora_path": "inside"}, 400, "links that lead out of the allowed folder"),
    *(
        ({"lora_name": "x", "lora_path": path}, 404, "nothing of this name below the allowed folder")
        for path in ("nowhere", "../secret", "link", "/etc", "sql/../../secret", "a\0b", "a" * 4000)
    ),
]


@pytest.mark.parametrize("body, status, problem", REFUSED)
def test_what_may_not_be_loaded_is_refused_without_a_path(service: Service, ask: Callable, root: Path, body, status, problem):
    answer = ask("/v1/load_lora_adapter", body)
    assert (answer.status_code, problem in answer.json()["error"]["message"]) == (status, True), answer.text
    assert str(root.parent) not in answer.text
    assert not service.front.engine.adapters.loaded


def test_an_absolute_path_below_the_root_is_allowed_and_none_without_a_root(service: Service, ask: Callable, root: Path):
    body = {"lora_name": "x", "lora_path": str(root / "sql")}
    assert ask("/v1/load_lora_adapter", body).status_code == 200
    alias = {"lora_name": "z", "lora_path": "alias"}
    assert ask("/v1/load_lora_adapter", alias).status_code == 200, "a link that stays inside"
    app = App(service, admin=Admin(service, AdminSettings(shared=True, key="secret"))).asgi
    answer = inside(app, lambda client: client.post("/v1/load_lora_adapter", json=body | {"lora_name": "y"}, headers=KEY))
    assert (answer.status_code, "admin.root" in answer.text) == (403, True)


def scored(lm: LM, ids: list[int], seed: int | None, rank: int = 0) -> np.ndarray:
    module = random_model(lm.config, 0).module
    if seed is not None:
        put_adapter(module, factors_of(lm.module, seed, rank))
    return LM(lm.config, module).score([ids])[0]


def test_prompt_logprobs_are_those_under_the_adapter_that_is_named(lm: LM, ask: Callable):
    ask("/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": "sql"})
    ids = list(range(5, 25))
    for model, adapter in (("sql", (0, 2)), ("tiny", (None,))):
        truth = scored(lm, ids, *adapter)
        body = {"model": model, "prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 1}
        echoed = ask("/v1/completions", body).json()["choices"][0]["logprobs"]["token_logprobs"]
        vllm = ask("/v1/completions", {"model": model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 1})
        entries = vllm.json()["choices"][0]["prompt_logprobs"]
        assert echoed[0] is entries[0] is None
        np.testing.assert_allclose(echoed[1:], truth, atol=1e-4)
        np.testing.assert_allclose([entry[str(token)]["logprob"] for entry, token in zip(entries[1:], ids[1:])], truth, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["scored", "left"])
def test_prompts_keep_their_adapter_until_they_are_scored_or_left(
    monkeypatch: pytest.MonkeyPatch, lm: LM, service: Service, ask: Callable, end: str
):
    """Unloaded between two passes of a long prompt; another adapter gets the place only once the prompt is done with."""
    monkeypatch.setattr("argosy.infer.prompt_logprobs.PASS", 16)
    ask("/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": "sql"})
    front, ids = service.front, list(range(3, 43))
    adapters, score, free = front.engine.adapters, front.prompts.score, []

    def unloading(prompts: Any, adapter: Any) -> Any:
        if "sql" in adapters.loaded:
            adapters.unload("sql")
        free.append(len(adapters._free()))
        return score(prompts, adapter)

    async def go() -> Any:
        async with front.open([], [ids], adapter="sql") as answers:
            if end == "scored":
                return await answers.scored()
            while not free:
                await asyncio.sleep(0.01)

    front.prompts.score = unloading  # pyright: ignore[reportAttributeAccessIssue]
    try:
        prompt_scores = asyncio.run(go())
    finally:
        del front.prompts.score
    assert set(free) == {1}, "of two places"
    if end == "scored":
        np.testing.assert_allclose(prompt_scores[0].logprobs, scored(lm, ids, 0, 2), atol=1e-4)

    async def places() -> int:
        return await front.call(lambda engine: len(engine.adapters._free()))

    assert asyncio.run(places()) == 2


def test_metrics_name_the_adapters_of_running_and_waiting_answers(service: Service, ask: Callable):
    ask("/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": "sql"})

    async def go(client: httpx.AsyncClient) -> str:
        await service.front.pause("keep")
        async with service.front.open([Request([1, 2], 3, adapter="sql")]):
            text = (await client.get("/metrics", headers=KEY)).text
        await service.front.resume()
        return text

    text = inside(App(service).asgi, go)
    labels = 'max_lora="2",running_lora_adapters="",waiting_lora_adapters="sql"'
    assert f"vllm:lora_requests_info{{{labels}}}" in text
    assert 'waiting_lora_adapters="sql"' not in ask("/metrics").text


def test_a_server_without_adapters_says_which_setting_allows_them(lm: LM, root: Path):
    with answering(lm, SIZES) as service:
        app = App(service, admin=Admin(service, AdminSettings(shared=True, key="secret", root=str(root)))).asgi
        body = {"lora_name": "sql", "lora_path": "sql"}
        answer = inside(app, lambda client: client.post("/v1/load_lora_adapter", json=body, headers=KEY))
        assert (answer.status_code, "engine.lora.enabled" in answer.text) == (400, True)
        assert b"lora_requests_info" not in service.front.metrics.text()


# ---------------------------------------------------------------- keys and ports


def test_without_the_setting_the_routes_are_absent(service: Service):
    app = App(service).asgi
    paths = [route.path for route in Admin(service, AdminSettings(key="secret")).routes()]
    assert len(paths) == 13

    async def go(client: httpx.AsyncClient) -> list[int]:
        return [(await client.post(path, json={}, headers=KEY)).status_code for path in paths]

    assert set(inside(app, go)) == {404}


def test_each_key_opens_its_own_routes_only(service: Service, root: Path):
    admin = Admin(service, AdminSettings(shared=True, key="secret", root=str(root)))
    app = App(service, key="public", admin=admin).asgi

    async def go(client: httpx.AsyncClient) -> dict[tuple[str, str], int]:
        return {
            (path, key): (await client.get(path, headers={"authorization": f"Bearer {key}"})).status_code
            for path in ("/weight_info", "/v1/models")
            for key in ("public", "secret", "")
        }

    statuses = inside(app, go)
    assert [place for place, status in statuses.items() if status == 200] == [("/weight_info", "secret"), ("/v1/models", "public")]
    assert set(statuses.values()) == {200, 401}


def test_the_admin_port_is_a_server_of_its_own(lm: LM):
    settings = ServeSettings(port=0, drain=5, admin=AdminSettings(port=0, key="secret"))
    listener, admin_listener = bound_socket(settings.host, settings.port), run.admin_socket(settings)
    stop, ready = threading.Event(), threading.Event()
    urls = [f"http://127.0.0.1:{listener.getsockname()[1]}" for listener in (listener, admin_listener)]
    with answering(lm, SIZES) as service:
        kwargs = {"stop": stop.is_set, "ready": ready.set, "admin": admin_listener}
        thread = threading.Thread(target=run.serve_until, args=(service, settings, listener), kwargs=kwargs)
        thread.start()
        try:
            assert ready.wait(60)
            assert [httpx.get(f"{url}/health").status_code for url in urls] == [200, 200]
            assert [httpx.get(f"{url}/is_paused", headers=KEY).status_code for url in urls] == [404, 200]
            assert [httpx.get(f"{url}/metrics", headers=KEY).status_code for url in urls] == [200, 200]
            assert [httpx.get(f"{url}/metrics").status_code for url in urls] == [200, 401]
            assert httpx.get(f"{urls[1]}/v1/models", headers=KEY).status_code == 404
            assert httpx.get(f"{urls[1]}/is_paused", headers=KEY | {"host": "evil.example"}).status_code == 403
        finally:
            stop.set()
            thread.join(60)
        assert not thread.is_alive()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{urls[1]}/health")


@pytest.mark.parametrize(
    "settings, problem",
    [
        ({"admin": {"port": 0}}, "need a key"),
        ({"admin": {"shared": True}}, "need a key"),
        ({"admin": {"port": 0, "key": "a"}, "api_key": "a"}, "admin.key is the key of the API"),
        ({"admin": {"port": 0, "key": "a", "root": "/nowhere"}}, "no folder `/nowhere`"),
        ({"admin": {"key": "a"}}, "there are none"),
        ({"lora_modules": {"a": "b"}}, "takes no adapters"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_before_the_model_is_loaded(settings: dict[str, Any], problem: str):
    with pytest.raises(BadInput, match=problem):
        run.check_server(ServeSettings(**settings))


# ---------------------------------------------------------------- pauses


async def tokens_of(answers: Any, most: int | None = None) -> list[int]:
    tokens: list[int] = []
    async for _, event in answers:
        tokens += [] if event.token is None else [event.token]
        if len(tokens) == most:
            break
    return tokens


@pytest.mark.slow
def test_a_pause_that_keeps_requests_lets_them_go_on(lm: LM, service: Service):
    async def go() -> tuple[list[int], int]:
        front = service.front
        async with front.open([Request([5, 6, 7], 40)]) as answers:
            tokens = await tokens_of(answers, 3)
            await front.pause("keep")
            steps = front.engine.stats.steps
            async with front.open([Request([1, 2], 2)]) as late:
                await asyncio.sleep(0.05)
                more = front.engine.stats.steps - steps
                await front.resume()
                tokens += await tokens_of(answers)
                assert len(await tokens_of(late)) == 2
        return tokens, more

    tokens, more = asyncio.run(go())
    assert (tokens, more) == (greedy(service.front.engine.model, [5, 6, 7], 40), 0)


def test_a_pause_that_aborts_gives_readers_what_there_is(service: Service):
    async def go() -> tuple[list[int], str, int]:
        front = service.front
        async with front.open([Request([5, 6, 7], 100)]) as answers:
            events = [event async for _, event in _first(answers, 2)]
            await front.pause("abort")
            rest = [event async for _, event in answers]
            aborted = front.abort()
            await front.resume()
        return [e.token for e in events + rest if e.token is not None], rest[-1].finish_reason, aborted

    tokens, reason, aborted = asyncio.run(go())
    assert reason == "abort"
    assert tokens == greedy(service.front.engine.model, [5, 6, 7], len(tokens))
    assert aborted == 1, "a request counts until its reader has left"


async def _first(answers: Any, most: int) -> Any:
    async for item in answers:
        yield item
        most -= 1
        if not most:
            return


def test_a_pause_that_waits_lets_earlier_requests_finish_and_holds_later_ones(service: Service):
    async def go() -> list[Any]:
        front = service.front
        async with front.open([Request([5, 6, 7], 30)]) as first:
            await tokens_of(first, 1)
            pausing = asyncio.create_task(front.pause("wait"))
            await asyncio.sleep(0)
            async with front.open([Request([1, 2], 2)]) as answers, front.open([Request([3], 90)]):
                await asyncio.wait_for(pausing, 30)
                assert front.paused
                count = len(await tokens_of(first)) + 1
                waiting = [row.number for row in answers.rows]
                steps = front.engine.stats.steps
                await front.resume()
                late = await tokens_of(answers)
        assert front.engine.stats.steps > steps
        return [count, waiting, len(late), front.paused]

    assert asyncio.run(go()) == [30, [-1], 2, False]


def test_a_pause_that_is_ended_before_it_begins_says_so(service: Service):
    async def go() -> int:
        front = service.front
        async with front.open([Request([5, 6, 7], 100)]):
            pausing = asyncio.create_task(front.pause("wait"))
            await front.call(lambda engine: None)
            await front.resume()
            with pytest.raises(ApiError, match="ended before it began") as error:
                await pausing
        return error.value.status

    assert asyncio.run(go()) == 409


def test_one_request_is_aborted_by_its_id(ask: Callable, service: Service):
    async def go(client: httpx.AsyncClient) -> Any:
        body = {"prompt": [5, 6], "max_tokens": 100, "ignore_eos": True}
        answer = asyncio.create_task(client.post("/v1/completions", json=body | {"request_id": "mine"}))
        while not service.front.opened:
            await asyncio.sleep(0)
        return service.front.abort(["other"]), service.front.abort(["mine"]), (await answer).json()["choices"][0]

    other, mine, choice = inside(App(service).asgi, go)
    assert (other, mine, choice["finish_reason"]) == (0, 1, "abort")
    assert ask("/abort_requests", {}).json() == {"status": "aborted", "aborted": 0}


@pytest.mark.parametrize(
    "path, body, key, ends",
    [
        ("/v1/responses", {"input": "x", "max_output_tokens": 100}, "status", "cancelled"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 100}, "stop_reason", "max_tokens"),
    ],
)
def test_other_routes_name_the_adapter_and_say_that_they_were_cut_short(
    service: Service, ask: Callable, monkeypatch, path: str, body: dict, key: str, ends: str
):
    ask("/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": "sql"})
    monkeypatch.setattr(service.lm, "stops", set)

    async def go(client: httpx.AsyncClient) -> Any:
        answer = asyncio.create_task(client.post(path, json=body | {"model": "sql"}))
        while not service.front.opened:
            await asyncio.sleep(0)
        service.front.abort()
        return (await answer).json()

    document = inside(App(service).asgi, go)
    assert (document["model"], document[key]) == ("sql", ends), document


@pytest.mark.slow
def test_the_prefix_cache_is_reset_unless_requests_hold_pages(ask: Callable, service: Service):
    prompt = list(range(40))
    engine = service.front.engine

    async def go() -> list[bool]:
        front, resets = service.front, []
        async with front.open([Request(prompt, 60)]) as answers:
            first = await tokens_of(answers, 2)
            resets.append(await front.call(lambda engine: engine.reset_prefix_cache()))
            resets.append(await front.call(lambda engine: engine.reset_prefix_cache(running=True)))
            rest = await tokens_of(answers)
        resets.append(first + rest == greedy(engine.model, prompt, 60))
        return resets

    assert asyncio.run(go()) == [False, True, True]
    assert ask("/reset_prefix_cache", method="POST").json() == {"success": True}
    assert engine.pages.lookup(engine.pages._page_of) == []
    assert ask("/reset_prefix_cache?reset_external=true", method="POST").status_code == 400
    assert ask("/reset_prefix_cache?other=1", method="POST").status_code == 400


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
def test_the_routes_pause_and_resume(ask: Callable, mode: str):
    assert ask(f"/pause?mode={mode}", method="POST").json() == {"status": "paused"}
    assert ask("/is_paused").json() == {"is_paused": True}
    assert ask("/resume", method="POST").json() == {"status": "resumed"}
    assert ask("/is_paused").json() == {"is_paused": False}
    assert ask("/pause?mode=sleep", method="POST").status_code == 400


# ---------------------------------------------------------------- weights


def update(ask: Callable, path: str, version: str | None = None) -> httpx.Response:
    ask("/start_weight_update", method="POST")
    answer = ask("/update_weights", {"update_info": {"path": path}})
    assert answer.status_code == 200, answer.text
    return ask("/finish_weight_update", {} if version is None else {"weight_version": version})


@pytest.mark.slow
def test_new_weights_answer_after_an_update_and_adapters_stay(lm: LM, other: LM, ask: Callable):
    ask("/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": "sql"})
    assert ask("/weight_info").json() == {"weight_version": "default"}
    assert "x-weight-version" not in ask("/v1/completions", {"prompt": "x", "max_tokens": 1}).headers
    assert update(ask, "next", "step-1").json() == {"message": "Weight update finished"}
    assert ask("/weight_info").json() == {"weight_version": "step-1"}
    assert ask("/v1/completions", {"prompt": "x", "max_tokens": 1}).headers["x-weight-version"] == "step-1"
    assert greedy_of(ask, "tiny") == greedy(other.module, [5, 6, 7], 6)
    adapted = random_model(lm.config, 1).module
    put_adapter(adapted, factors_of(lm.module, 0, 2))
    assert greedy_of(ask, "sql") == greedy(adapted, [5, 6, 7], 6)
    assert ask("/update_weight_version", {"new_version": "2"}).json() == {"success": True, "new_version": "2"}
    assert ask("/weight_info").json() == {"weight_version": "2"}


@pytest.mark.parametrize("path", ["part.safetensors", "next/model.safetensors"])
def test_a_file_holds_some_weights_or_all_under_either_names(lm: LM, other: LM, service: Service, ask: Callable, path: str):
    assert update(ask, path).status_code == 200
    old, new = (to_layers(lm.module, split(lm.module)[1]) for lm in (lm, other))
    for name, a in to_layers(service.front.engine.model, service.front.engine.weights()).items():
        changed = path.startswith("next") or name.startswith("layers.1.")
        np.testing.assert_array_equal(a, (new if changed else old)[name], err_msg=name)


@pytest.mark.parametrize("path", ["/finish_weight_update", "/update_weight_version", "/v1/load_lora_adapter", "/v1/completions"])
def test_a_body_is_read_within_the_limits(service: Service, path: str):
    """By the ASGI protocol itself: httpx's transport without a socket hands over a body whole."""
    app = App(service, admin=Admin(service, AdminSettings(shared=True, key="secret"))).asgi
    sizes, messages = [], []

    async def receive() -> dict[str, Any]:
        sizes.append(LIMITS.body // 4)
        assert len(sizes) < 100, "it reads for ever"
        return {"type": "http.request", "body": b" " * sizes[-1], "more_body": True}

    async def send(message: Any) -> None:
        messages.append(message)

    headers = [(b"authorization", b"Bearer secret"), (b"content-type", b"application/json"), (b"host", b"localhost")]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": headers}
    asyncio.run(app(scope | {"client": ("127.0.0.1", 1), "server": ("localhost", 80), "scheme": "http"}, receive, send))
    assert messages[0]["status"] == 413
    assert sum(sizes) <= LIMITS.body + 2 * sizes[0]


@pytest.mark.slow
def test_a_running_answer_goes_on_with_the_new_weights_from_its_next_token(lm: LM, other: LM, service: Service, root: Path):
    admin = Admin(service, AdminSettings(shared=True, key="secret", root=str(root)))

    async def go(client: httpx.AsyncClient) -> tuple[list[int], int]:
        front = service.front
        async with front.open([Request([5, 6, 7], 24)]) as answers:
            tokens = await tokens_of(answers, 4)
            await client.post("/pause?mode=keep")
            sequence = front.engine._requests[answers.rows[0].number]
            before = sequence.scheduled.completion_length
            await client.post("/start_weight_update")
            await client.post("/update_weights", json={"update_info": {"path": "next"}})
            await client.post("/finish_weight_update")
            await client.post("/resume")
            tokens += await tokens_of(answers)
        return tokens, before

    async def keyed(client: httpx.AsyncClient) -> Any:
        client.headers.update(KEY)
        return await go(client)

    tokens, before = inside(admin_app(admin, App(service)), keyed)
    # The engine is ahead of its reader, by `before` tokens when the pause had begun; the next ones are of the new weights.
    old, module = greedy(random_model(lm.config, 0).module, [5, 6, 7], 24), other.module
    assert tokens[:before] == old[:before]
    assert tokens[before:] == greedy(module, [5, 6, 7, *tokens[:before]], 24 - before)
    assert tokens != old
    assert tokens[:before] != greedy(module, [5, 6, 7], before)


WRONG = [
    ("wide", "other settings: ffn"),
    ("empty", "is not a model"),
    ("sql/adapter_model.safetensors", "are no weights of this model"),
    ("nowhere", "below the allowed folder"),
    ("../secret", "below the allowed folder"),
]


@pytest.mark.parametrize("path, problem", WRONG)
def test_an_update_that_fails_leaves_the_old_weights(service: Service, ask: Callable, root: Path, path: str, problem: str):
    before = service.front.engine.weights()
    ask("/start_weight_update", method="POST")
    answer = ask("/update_weights", {"update_info": {"path": path}})
    assert answer.status_code in (400, 404)
    assert problem in answer.json()["error"]["message"]
    assert str(root.parent) not in answer.text
    assert ask("/finish_weight_update", {"weight_version": "wrong"}).status_code == 400
    assert ask("/weight_info").json() == {"weight_version": "default"}
    assert all(a is before[address] for address, a in service.front.engine.weights().items())


@pytest.mark.slow
def test_a_prompt_that_is_half_scored_begins_again_with_the_new_weights(service: Service, ask: Callable, monkeypatch):
    monkeypatch.setattr("argosy.infer.prompt_logprobs.PASS", 32)
    prompts, ids = service.front.prompts, list(range(60))
    assert prompts.score([ids]) is None, "one of two passes"
    assert update(ask, "next").status_code == 200
    scored = prompts.score([ids]) or prompts.score([ids])
    expected = LM(service.lm.config, service.front.engine.model).score([ids])[0]
    np.testing.assert_allclose(scored[0].logprobs, expected, atol=1e-4)


@pytest.mark.slow
def test_an_update_begins_before_it_is_filled_and_other_transports_are_refused(ask: Callable):
    for path, body in (("/update_weights", {"update_info": {"path": "next"}}), ("/finish_weight_update", {})):
        assert ask(path, body).status_code == 409
    answer = ask("/init_weight_transfer_engine", {"init_info": {}})
    assert (answer.status_code, "come from files" in answer.text) == (400, True)
    ask("/start_weight_update", method="POST")
    assert ask("/update_weights", {"update_info": {"names": ["w"], "shapes": [[1]]}}).status_code == 400
