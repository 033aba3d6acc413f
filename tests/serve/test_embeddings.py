"""Embeddings, scores and rankings over HTTP: the vectors are those of `lm.embed`, whatever else is asked at the same time."""

import asyncio
import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from helpers import shared
from serve.conftest import inside, listening, serving

import argosy
from argosy.core.errors import BadInput
from argosy.core.settings import read_settings, words_layer
from argosy.data.tokenizers.load import find_tokenizer
from argosy.infer.lm import LM
from argosy.infer.settings import EngineSettings
from argosy.models import FAMILIES
from argosy.serve import run
from argosy.serve.app import App
from argosy.serve.engine.encoder import EncoderService, TextBatch, next_pass, pass_rows, pass_shapes
from argosy.serve.settings import ServerLimits, ServeSettings
from argosy.web.errors import ApiError
from argosy.weights.build import random_model

CONTEXT = 40
TEXTS = ["Hello", "a longer text, of some more words than the other", "", "the end", "more " * 30]
LIMITS = ServerLimits(texts=6, queue=8, queue_tokens=200)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> LM:
    """A small BERT with the words of the published one, whose folder asks for vectors of length 1."""
    folder = tmp_path_factory.mktemp("encoder")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    steps = [{"path": "1_Pooling" if kind == "Pooling" else "", "type": kind} for kind in ("Transformer", "Pooling", "Normalize")]
    (folder / "modules.json").write_text(json.dumps(steps))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": CONTEXT}))
    tokenizer = find_tokenizer(str(shared("tokenizers/bert_uncased_vocab.txt")))
    config = FAMILIES["bert"].examples()["plain"].model_copy(update={"vocab": 30522, "layers": 1})
    return LM(config, random_model(config, 0).module, tokenizer, companions=folder)


@contextmanager
def encoding(lm: LM, limits: ServerLimits = LIMITS) -> Iterator[EncoderService]:
    service = run.build_encoder(lm, "small", ServeSettings(warm_up=False, limits=limits), None)
    try:
        yield service
    finally:
        service.front.close()
    assert not service.front.opened
    assert (service.front.waiting, service.front.waiting_tokens) == (0, 0)


@pytest.fixture(scope="module")
def service(encoder: LM) -> Iterator[EncoderService]:
    with encoding(encoder) as service:
        yield service


def ask(service: Any, path: str, status: int = 200, **body: Any) -> Any:
    """One request; its answer, or its error."""
    answer = inside(App(service).asgi, lambda client: client.post(path, json=body))
    assert answer.status_code == status, answer.text
    return answer.json() if status == 200 else answer.json()["error"]


def vectors_of(answer: Any) -> np.ndarray:
    assert [entry["index"] for entry in answer["data"]] == list(range(len(answer["data"])))
    return np.asarray([entry["embedding"] for entry in answer["data"]], np.float32)


@contextmanager
def hold_engine(service: EncoderService) -> Iterator[threading.Event]:
    """Holds the thread in its next pass until the event is set, which the end of the block does too."""
    engine, go = service.front.engine, threading.Event()
    pooled = engine.pooled
    engine.pooled = lambda rows, shape=None: (go.wait(60), pooled(rows, shape))[1]  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield go
    finally:
        go.set()
        engine.pooled = pooled


# ---------------------------------------------------------------- embeddings


@pytest.mark.slow
def test_the_official_client_gets_the_vectors_of_the_model(encoder: LM):
    with (
        encoding(encoder) as service,
        listening(service) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        expected = encoder.embed(TEXTS)
        coded = client.embeddings.create(model="small", input=TEXTS, extra_body={"truncate_prompt_tokens": -1})
        plain = client.embeddings.create(
            model="small", input=TEXTS[0], encoding_format="float", user="somebody"
        )
        models = client.models.list().data
    np.testing.assert_allclose([embedding.embedding for embedding in coded.data], expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(plain.data[0].embedding, expected[0], rtol=0, atol=1e-6)
    assert [embedding.index for embedding in coded.data] == list(range(len(TEXTS)))
    assert plain.usage.prompt_tokens == plain.usage.total_tokens == 3
    assert [model.id for model in models] == ["small"]


def test_input_comes_in_four_forms(encoder: LM, service: EncoderService):
    ids = [service.tokenized(text, True) for text in TEXTS[:2]]
    expected = encoder.embed(TEXTS[:2])
    for input_form, rows in ((TEXTS[0], 1), (TEXTS[:2], 2), (ids[0], 1), (ids, 2)):
        answer = ask(service, "/v1/embeddings", input=input_form)
        np.testing.assert_allclose(vectors_of(answer), expected[:rows], rtol=0, atol=1e-6)
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids[:rows]))


def test_base64_is_little_endian_float32(service: EncoderService):
    coded = ask(service, "/v1/embeddings", input=TEXTS[:2], encoding_format="base64")["data"]
    plain = vectors_of(ask(service, "/v1/embeddings", input=TEXTS[:2]))
    np.testing.assert_array_equal([np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in coded], plain)


def test_a_text_that_is_too_long_is_refused_or_cut(encoder: LM, service: EncoderService):
    long = "more " * 100
    error = ask(service, "/v1/embeddings", 400, input=["a", long])
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    assert "text 1 has 102 tokens" in error["message"]
    assert ask(service, "/v1/embeddings", 400, input=[5] * (CONTEXT + 1))["code"] == "context_length_exceeded"
    cut = ask(service, "/v1/embeddings", input=long, truncate_prompt_tokens=-1)
    np.testing.assert_allclose(vectors_of(cut), encoder.embed([long]), rtol=0, atol=1e-6)
    assert cut["usage"]["prompt_tokens"] == CONTEXT
    ids = service.tokenized(long, True)
    five = ask(service, "/v1/embeddings", input=long, truncate_prompt_tokens=5)
    np.testing.assert_allclose(vectors_of(five), encoder.embed([[*ids[:4], ids[-1]]]), rtol=0, atol=1e-6)
    five = ask(service, "/v1/embeddings", input=ids, truncate_prompt_tokens=5)
    np.testing.assert_allclose(vectors_of(five), encoder.embed([ids[:5]]), rtol=0, atol=1e-6)


def test_special_tokens_may_be_left_out(encoder: LM, service: EncoderService):
    ids = encoder.tokenizer.encode(TEXTS[1])
    vectors = vectors_of(ask(service, "/v1/embeddings", input=TEXTS[1], add_special_tokens=False))
    np.testing.assert_allclose(vectors, encoder.embed([ids]), rtol=0, atol=1e-6)


def test_vectors_are_cut_where_the_folder_allows_it_before_they_are_scaled(encoder: LM, service: EncoderService):
    width = encoder.config.width
    whole = encoder.embed(["Hello"], normalize=False)
    error = ask(service, "/v1/embeddings", 400, input="Hello", dimensions=8)
    assert (error["code"], error["param"]) == ("unsupported_parameter", "dimensions")
    assert vectors_of(ask(service, "/v1/embeddings", input="Hello", dimensions=width)).shape == (1, width)
    try:
        encoder.hub = {"is_matryoshka": True}
        vectors = vectors_of(ask(service, "/v1/embeddings", input="Hello", dimensions=8))
        np.testing.assert_allclose(vectors, whole[:, :8] / np.linalg.norm(whole[:, :8]), rtol=0, atol=1e-6)
        assert "1 to" in ask(service, "/v1/embeddings", 400, input="Hello", dimensions=width + 1)["message"]
        encoder.hub = {"matryoshka_dimensions": [8, 16]}
        assert vectors_of(ask(service, "/v1/embeddings", input="Hello", dimensions=16)).shape == (1, 16)
        assert "8, 16" in ask(service, "/v1/embeddings", 400, input="Hello", dimensions=9)["message"]
    finally:
        encoder.hub = {}


@pytest.mark.parametrize(
    "path, body, param",
    [
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": [[]]}, "input"),
        ("/v1/embeddings", {"input": ["a", [5]] * 4}, "input"),
        ("/v1/embeddings", {"input": [30522]}, "input"),
        ("/v1/embeddings", {"input": "", "add_special_tokens": False}, "input"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": CONTEXT + 1}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 1}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "a", "temperature": 1}, "temperature"),
        ("/v1/embeddings", {"input": ["a"] * 7}, "input"),
        ("/score", {"text_1": [], "text_2": "a"}, "text_1"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/score", {"text_1": ["a", "b"], "text_2": "a"}, "text_1"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["b " * 50]}, "documents"),
    ],
)
def test_what_is_wrong_is_refused_by_name(service: EncoderService, path: str, body: dict[str, Any], param: str):
    assert ask(service, path, 400, **body)["param"] == param


# ---------------------------------------------------------------- scores and rankings


def test_scores_are_cosines_one_to_many_and_in_pairs(encoder: LM, service: EncoderService):
    unit = encoder.embed(TEXTS[:4], normalize=True)
    for path in ("/score", "/v1/score"):
        many = ask(service, path, text_1=TEXTS[0], text_2=TEXTS[1:4])
        np.testing.assert_allclose([entry["score"] for entry in many["data"]], unit[1:4] @ unit[0], rtol=0, atol=1e-6)
    assert [(entry["index"], entry["object"]) for entry in many["data"]] == [(i, "score") for i in range(3)]
    pairs = ask(service, "/score", text_1=TEXTS[:2], text_2=TEXTS[2:4])
    expected = [unit[0] @ unit[2], unit[1] @ unit[3]]
    np.testing.assert_allclose([entry["score"] for entry in pairs["data"]], expected, rtol=0, atol=1e-6)
    assert pairs["usage"]["prompt_tokens"] == sum(len(service.tokenized(text, True)) for text in TEXTS[:4])


def test_documents_come_by_their_likeness_to_the_query(encoder: LM, service: EncoderService):
    documents = [*TEXTS[1:4], "hello"]
    scores = encoder.embed(documents) @ encoder.embed(["Hello"])[0]
    order = np.argsort(-scores, kind="stable").tolist()
    assert order[0] == 3
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        results = ask(service, path, query="Hello", documents=documents)["results"]
        assert [entry["index"] for entry in results] == order
    assert [entry["document"]["text"] for entry in results] == [documents[i] for i in order]
    np.testing.assert_allclose([entry["relevance_score"] for entry in results], scores[order], rtol=0, atol=1e-6)
    best = ask(service, "/rerank", query="Hello", documents=documents, top_n=2)["results"]
    assert [entry["index"] for entry in best] == order[:2]


# ---------------------------------------------------------------- the other routes


def test_routes_of_the_other_kind_say_so(lm: LM, service: EncoderService):
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert "is an encoder" in ask(service, path, 404, prompt="a")["message"]
    with serving(lm) as decoder:
        for path in ("/v1/embeddings", "/score", "/v1/rerank"):
            assert "is not an encoder" in ask(decoder, path, 404, input="a")["message"]


def test_texts_are_tokenized_as_they_are_read(service: EncoderService):
    ids = ask(service, "/tokenize", prompt="Hello there")["tokens"]
    assert (ids[0], ids[-1]) == (101, 102)
    bare = ask(service, "/tokenize", prompt="Hello there", add_special_tokens=False)
    assert (bare["tokens"], bare["max_model_len"]) == (ids[1:-1], CONTEXT)
    assert ask(service, "/detokenize", tokens=bare["tokens"])["prompt"] == "hello there"
    assert "no chat template" in ask(service, "/tokenize", 400, messages=[{"role": "user", "content": "a"}])["message"]


def test_texts_are_counted_once_and_documented(encoder: LM):
    text = (Path(__file__).parents[2] / "docs" / "guides" / "serving.md").read_text(encoding="utf-8")
    with encoding(encoder) as service:
        ask(service, "/v1/embeddings", input=TEXTS[:2])
        app = App(service).asgi
        lines = inside(app, lambda client: client.get("/metrics")).text.splitlines()
        names = [metric.name for metric in service.front.metrics.registry.collect()]
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    labels = '{engine="0",model_name="small"}'
    tokens = sum(len(service.tokenized(text, True)) for text in TEXTS[:2])
    assert float(values[f"vllm:prompt_tokens_total{labels}"]) == tokens
    assert float(values[f"vllm:request_prompt_tokens_count{labels}"]) == 2
    assert float(values['vllm:request_success_total{engine="0",finished_reason="stop",model_name="small"}']) == 1
    assert not [name for name in names if f"`{name}" not in text]


# ---------------------------------------------------------------- passes


def texts(*lengths: int) -> TextBatch:
    return TextBatch([[0] * n for n in lengths], np.zeros((len(lengths), 1)), asyncio.Future(loop=asyncio.new_event_loop()))


def test_texts_of_several_clients_share_a_pass_and_take_turns():
    many, short = texts(*[30] * 100, 20), texts(9)
    places, shape = next_pass([many, short], 128, 256)
    assert (shape, [place[0] for place in places]) == ((4, 32), [many] * 4)
    places, shape = next_pass([short, many], 128, 256)
    assert (shape, places) == ((1, 16), [(short, 0)]), "it waits for no text that would make it longer"
    places, shape = next_pass([texts(20), texts(24, 9, 100), texts(25)], 512, 256)
    assert shape == (4, 24)
    assert [len(texts.rows[place]) for texts, place in places] == [20, 24, 9]


def test_the_longest_text_alone_is_a_pass():
    assert next_pass([texts(200, 250)], 64, 250)[1] == (1, 250)
    assert [pass_rows(n, 64) for n in (1, 2, 3, 8, 9, 32, 33, 999)] == [1, 1, 4, 4, 16, 16, 64, 64]
    assert [pass_rows(n, most) for n, most in ((99, 0), (99, 3), (99, 15))] == [1, 1, 4]


@pytest.mark.parametrize("budget, context", [(512, 256), (100, 40), (32, 12), (48, 512)])
def test_every_pass_has_a_shape_that_was_compiled(budget: int, context: int):
    compiled = list(pass_shapes(budget, context))
    assert len(compiled) == len(set(compiled))
    shapes = {next_pass([texts(*[n] * count)], budget, context)[1] for n in range(1, context + 1) for count in (1, 3, 9, 99)}
    assert shapes == set(compiled)


def test_a_vector_is_the_same_in_any_company(encoder: LM, service: EncoderService):
    expected = encoder.embed(TEXTS)
    rows = service.rows(TEXTS, -1, "input")

    async def go() -> list[np.ndarray]:
        with hold_engine(service) as proceed:
            tasks = [asyncio.create_task(service.front.vectors([row])) for row in rows]
            await asyncio.sleep(0.05)
            proceed.set()
            return await asyncio.gather(*tasks)

    vectors = service.front.engine.finished(np.concatenate(asyncio.run(go())))
    np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-6)
    assert any(rows > 1 for rows, _ in service.front.engine.shapes), "none had company"


def test_an_encoder_is_served_with_the_settings_of_a_command_line(encoder: LM):
    def settings(*words: str) -> ServeSettings:
        return read_settings(ServeSettings, words_layer(["warm_up=false", *words])).value

    service = run.running_server(encoder, "small", settings("engine.budget=64"), None)
    service.front.close()
    assert isinstance(service, EncoderService)
    for word, name in (("engine.slots=3", "engine.slots"), ("engine.speculative=ngram", "engine.speculative")):
        with pytest.raises(BadInput, match=f"{name}: "):
            run.running_server(encoder, "small", settings(word), None)


def test_a_client_that_leaves_has_nothing_computed(service: EncoderService):
    passes: list[int] = []

    async def go() -> None:
        with hold_engine(service) as proceed:
            engine = service.front.engine
            holds = engine.pooled
            engine.pooled = lambda rows, shape=None: (passes.append(len(rows)), holds(rows, shape))[1]  # pyright: ignore[reportAttributeAccessIssue]
            first = asyncio.create_task(service.front.vectors([[5]]))
            while not passes:
                await asyncio.sleep(0.001)
            task = asyncio.create_task(service.front.vectors([[6]] * 3))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (service.front.waiting, service.front.waiting_tokens) == (1, 1)
            proceed.set()
            await first
            await service.front.vectors([[7]])

    asyncio.run(go())
    assert passes == [1, 1]


def test_clients_take_turns(encoder: LM):
    """Each pass holds one text here; the client that came second is not behind all of the first's."""
    with encoding(encoder, LIMITS.model_copy(update={"queue": 99})) as service:
        service.front.budget = 1
        ended: list[str] = []

        async def go() -> None:
            async def client(name: str, rows: list[list[int]]) -> None:
                await service.front.vectors(rows)
                ended.append(name)

            with hold_engine(service) as proceed:
                tasks = [asyncio.create_task(client("many", [[5]] * 20)), asyncio.create_task(client("one", [[6]]))]
                await asyncio.sleep(0)
                proceed.set()
                await asyncio.gather(*tasks)

        asyncio.run(go())
    assert ended == ["one", "many"]


def test_too_many_texts_are_refused_and_come_in_later(encoder: LM):
    with encoding(encoder) as service:

        async def go() -> None:
            with hold_engine(service) as proceed:
                first = asyncio.create_task(service.front.vectors([[5]] * 6))
                await asyncio.sleep(0)
                for rows in ([[6]] * 3, [[6] * 195]):
                    with pytest.raises(ApiError) as refused:
                        await service.front.vectors(rows)
                    assert (refused.value.status, refused.value.code) == (503, "queue_full")
                proceed.set()
                await first
                await service.front.vectors([[6]] * 3)

        asyncio.run(go())


def test_a_drain_waits_for_texts_and_then_gives_up(encoder: LM):
    with encoding(encoder) as service:

        async def go() -> None:
            with hold_engine(service) as proceed:
                first = asyncio.create_task(service.front.vectors([[5]]))
                await asyncio.sleep(0)
                draining = asyncio.create_task(service.front.drain(60))
                await asyncio.sleep(0)
                with pytest.raises(ApiError, match="shutting down"):
                    await service.front.vectors([[6]])
                proceed.set()
                assert (await first).shape == (1, 44)
                await draining

        asyncio.run(go())
    with encoding(encoder) as service:

        async def late() -> None:
            with hold_engine(service):
                first = asyncio.create_task(service.front.vectors([[5]]))
                await asyncio.sleep(0)
                await service.front.drain(0)
                with pytest.raises(ApiError, match="shutting down"):
                    await first

        asyncio.run(late())


def test_a_request_that_takes_too_long_ends_with_an_error(encoder: LM):
    with encoding(encoder, LIMITS.model_copy(update={"seconds": 0.01})) as service, hold_engine(service):
        error = ask(service, "/v1/embeddings", 504, input="a")
    assert error["code"] == "timeout"


def test_an_encoder_that_breaks_fails_every_request(encoder: LM, capsys: pytest.CaptureFixture[str]):
    with encoding(encoder) as service:

        def breaks(rows: Any, shape: Any = None) -> Any:
            raise RuntimeError("the device is gone")

        service.front.engine.pooled = breaks  # pyright: ignore[reportAttributeAccessIssue]
        for _ in range(2):
            assert ask(service, "/v1/embeddings", 503, input="a")["code"] == "engine_dead"
        assert inside(App(service).asgi, lambda client: client.get("/health")).status_code == 503
    assert "the device is gone" in capsys.readouterr().err


def test_each_kind_has_its_service(encoder: LM, lm: LM):
    with pytest.raises(BadInput, match="not an encoder"):
        run.build_encoder(lm, "tiny", ServeSettings(), None)
    with pytest.raises(BadInput, match="is an encoder"):
        run.build_service(encoder, "small", ServeSettings(), None)
    with pytest.raises(BadInput, match=r"engine.cache_dtype: .* is an encoder"):
        run.build_encoder(encoder, "small", ServeSettings(engine=EngineSettings(cache_dtype="int8")), None)
    service = run.running_server(encoder, "small", ServeSettings(warm_up=False), None)
    service.front.close()
    assert isinstance(service, EncoderService)
    assert service.about == ["small: vectors of 44 numbers for texts of up to 40 tokens"]


# ---------------------------------------------------------------- MiniLM, trained


@pytest.mark.slow
def test_minilm_over_http():
    """After the warm-up nothing is compiled, and the vectors are those of sentence-transformers."""
    from models.test_encoders import minilm_folder

    lm = argosy.load(minilm_folder())
    cases = json.loads((shared("models/minilm") / "golden.json").read_text(encoding="utf-8"))["cases"]
    service = run.build_encoder(lm, "minilm", ServeSettings(), None)
    compiled = len(service.front.engine.shapes)
    try:
        answer = ask(service, "/v1/embeddings", input=[case["text"] for case in cases])
    finally:
        service.front.close()
    np.testing.assert_allclose(vectors_of(answer), [case["embedding"] for case in cases], rtol=0, atol=1e-5)
    assert len(service.front.engine.shapes) == compiled
