"""Ensembles: what they compute against the same steps by hand, what is refused when they are loaded, and members that come and go."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import shared
from predict_servers import serving, write_scaled

import argosy
from argosy.core.errors import BadInput
from argosy.data.tokenizers.load import find_tokenizer
from argosy.export.bundle import Bundle
from argosy.export.manifest import BundleSignature, TensorSignature
from argosy.export.steps import TokenizeStep
from argosy.infer.lm import LM
from argosy.models import FAMILIES
from argosy.predict.ensemble_plan import plan_ensemble
from argosy.predict.metrics import PredictMetrics
from argosy.predict.padding import batch_axis
from argosy.predict.protocol import InferenceProtocol
from argosy.predict.repository import Repository
from argosy.predict.service import PredictService
from argosy.predict.settings import EnsembleSettings, EnsembleStep, PredictSettings
from argosy.predict.tensors import TEXTS
from argosy.web.errors import ApiError
from argosy.weights.build import random_model

WEIGHT = np.asarray([[1.0, -2.0], [0.5, 3.0], [0.0, 1.0]], np.float32)
X = np.asarray([[1, 2, 3], [4, 5, 6]], np.float32)


def write_projection(path: Path) -> Path:
    """h [batch, 3] -> z [batch, 2]"""
    return write_function(path, lambda h: {"z": h @ WEIGHT}, h=jnp.zeros((1, 3)))


def write_sum(path: Path) -> Path:
    """first, second [batch, 2] -> total [batch, 2], largest [batch]"""

    def total(first: Any, second: Any) -> dict[str, Any]:
        return {"total": first + second, "largest": jnp.argmax(first + second, -1).astype(jnp.int32)}

    return write_function(path, total, first=jnp.zeros((1, 2)), second=jnp.zeros((1, 2)))


def write_function(path: Path, function: Callable[..., Any], **arrays: Any) -> Path:
    argosy.export(function, tuple(arrays.values()), path, platforms=["cpu"], batch="symbolic", inputs=list(arrays))
    return path


def ensemble_text(*steps: dict[str, Any], **more: Any) -> str:
    """A config.yml: JSON is YAML."""
    return json.dumps({"ensemble": {"steps": steps} | more})


def step(model: str, inputs: dict[str, str], outputs: dict[str, str], **more: Any) -> dict[str, Any]:
    return {"model": model, "input_map": inputs, "output_map": outputs} | more


# x goes two ways, and both meet.
DIAMOND = (
    step("sum", {"first": "left", "second": "right"}, {"total": "answer", "largest": "best"}),
    step("projection", {"h": "doubled"}, {"z": "left"}),
    step("scaled", {"x": "x"}, {"y": "doubled"}, version=1),
    step("projection", {"h": "x"}, {"z": "right"}),
)


def diamond(x: np.ndarray, factor: float = 2.0) -> np.ndarray:
    return factor * x @ WEIGHT + x @ WEIGHT


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("members")
    write_scaled(folder / "scaled" / "1", 2.0)
    write_scaled(folder / "scaled" / "2", 3.0)
    write_projection(folder / "projection" / "1")
    write_sum(folder / "sum" / "1")
    (folder / "scaled" / "config.yml").write_text("versions: all\n")
    return folder


@pytest.fixture
def models(bundles: Path, tmp_path: Path) -> Path:
    """A repository of its own, whose bundles are those of all."""
    for model in bundles.iterdir():
        (tmp_path / model.name).mkdir()
        for entry in model.iterdir():
            if entry.is_dir():
                (tmp_path / model.name / entry.name).symlink_to(entry)
            else:
                (tmp_path / model.name / entry.name).write_text(entry.read_text())
    return tmp_path


def add_ensemble(models: Path, text: str, name: str = "diamond") -> None:
    (models / name).mkdir(exist_ok=True)
    (models / name / "config.yml").write_text(text)


@pytest.fixture
def open_repository(models: Path) -> Iterator[Callable[[], tuple[Repository, PredictService]]]:
    repositories: list[Repository] = []

    def make() -> tuple[Repository, PredictService]:
        repository = Repository(models, PredictSettings(warm_up=False), PredictMetrics(), lambda _: None)
        repositories.append(repository)
        repository.look()
        return repository, PredictService(repository)

    yield make
    for repository in repositories:
        repository.close()


def call(service: PredictService, name: str = "diamond", **inputs: Any) -> dict[str, Any]:
    return asyncio.run(service.call(None, lambda: service.find(name), inputs or {"x": X}, None))[1].outputs


def test_steps_compute_what_they_do_one_by_one(models: Path, open_repository: Any):
    add_ensemble(models, ensemble_text(*DIAMOND))
    repository, service = open_repository()
    outputs = call(service)
    np.testing.assert_allclose(outputs["answer"], diamond(X), rtol=1e-6)
    np.testing.assert_array_equal(outputs["best"], np.argmax(diamond(X), -1))
    assert set(outputs) == {"answer", "best"}
    version = repository.find("diamond")
    of = version.bundle.manifest.signature()
    assert [(spec.name, spec.shape, spec.dtype) for spec in of.inputs] == [("x", ["batch", 3], "float32")]
    assert [(spec.name, spec.shape, spec.dtype) for spec in of.outputs] == [
        ("answer", ["batch", 2], "float32"), ("best", ["batch"], "int32")
    ]  # fmt: skip
    assert batch_axis(of) == "batch"
    # The two that read x run side by side.
    assert sorted(map(sorted, version.bundle.plan.levels)) == [[0], [1], [2, 3]]
    protocol = InferenceProtocol(service)
    config = protocol.config(version)
    assert (config["platform"], protocol.metadata(version)["platform"]) == ("ensemble", "ensemble")
    assert config["ensemble_scheduling"]["step"][2] == {
        "model_name": "scaled", "model_version": 1, "input_map": {"x": "x"}, "output_map": {"y": "doubled"}
    }  # fmt: skip
    assert config["ensemble_scheduling"]["step"][0]["model_version"] == -1


def test_requests_are_counted_for_the_ensemble_and_for_its_members(models: Path, open_repository: Any):
    add_ensemble(models, ensemble_text(*DIAMOND))
    _, service = open_repository()

    async def many() -> None:
        inputs = [np.full((1 + i % 3, 3), i, np.float32) for i in range(30)]
        results = await asyncio.gather(*(service.call(None, lambda: service.find("diamond"), {"x": x}, None) for x in inputs))
        for x, (_, result) in zip(inputs, results, strict=True):
            np.testing.assert_allclose(result.outputs["answer"], diamond(x), rtol=1e-6)

    asyncio.run(many())
    counts = {name: service.metrics.statistics(name, 1) for name in ("diamond", "scaled", "projection", "sum")}
    assert (counts["diamond"]["success"], counts["diamond"]["rows"], counts["diamond"]["batches"]) == (30, 60, 30)
    assert [counts[name]["rows"] for name in ("scaled", "projection", "sum")] == [60, 120, 60]
    # Members batch requests of the ensemble.
    assert counts["sum"]["batches"] < 30


def test_ensembles_of_ensembles(models: Path, open_repository: Any):
    add_ensemble(models, ensemble_text(step("diamond", {"x": "y"}, {"answer": "z"}), step("scaled", {"x": "x"}, {"y": "y"})), "a")
    add_ensemble(models, ensemble_text(*DIAMOND))
    _, service = open_repository()
    np.testing.assert_allclose(call(service, "a")["z"], diamond(3 * X), rtol=1e-6)


def replace_step(i: int, **more: Any) -> tuple[dict[str, Any], ...]:
    """The steps of the diamond with one changed."""
    steps = [dict(step) for step in DIAMOND]
    steps[i] |= more
    return tuple(steps)


@pytest.mark.parametrize(
    ("steps", "more", "reason"),
    [
        (replace_step(2, model="scled"), {}, "unknown model `scled`"),
        (replace_step(2, version=7), {}, "model `scaled` has no version `7`"),
        (replace_step(2, signature="other"), {}, "step 3: this bundle has no signature `other`"),
        (replace_step(2, input_map={"w": "x"}), {}, "step 3: `scaled` has no input `w`"),
        (replace_step(2, output_map={"w": "doubled"}), {}, "step 3: `scaled` has no output `w`"),
        (replace_step(2, output_map={"y": "left"}), {}, "`left` is written by step 2 (`projection`) and by step 3 (`scaled`)"),
        (replace_step(2, input_map={"x": "right"}), {}, "`right` is [batch, 2] in step 1 (`sum`) and [batch, 3] in step 3 (`scaled`)"),
        (
            (*DIAMOND, step("projection", {"h": "best"}, {"z": "more"})),
            {},
            "`best` is int32 in step 1 (`sum`) and float32 in step 5 (`projection`)",
        ),
        ((step("scaled", {"x": "a"}, {"y": "b"}), step("scaled", {"x": "b"}, {"y": "a"})), {}, "a circle of steps"),
        (DIAMOND, {"outputs": ["anwser"]}, "no step writes the output `anwser`"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_when_it_is_loaded(
    models: Path, open_repository: Any, steps: Any, more: dict[str, Any], reason: str
):
    add_ensemble(models, ensemble_text(*steps, **more))
    repository, service = open_repository()
    (entry,) = [entry for entry in InferenceProtocol(service).index(False) if entry["name"] == "diamond"]
    assert entry["state"] == "UNAVAILABLE"
    assert reason in entry["reason"]
    with pytest.raises(ApiError, match="is not ready") as refused:
        call(service)
    assert refused.value.status == 503
    assert not InferenceProtocol(service).ready()
    assert repository.find("scaled").version == 2


def test_circles_of_ensembles_and_wrong_settings_are_refused(models: Path, open_repository: Any):
    add_ensemble(models, ensemble_text(step("b", {"x": "x"}, {"y": "y"})), "a")
    add_ensemble(models, ensemble_text(step("c", {"x": "x"}, {"y": "y"})), "b")
    add_ensemble(models, ensemble_text(step("b", {"x": "x"}, {"y": "y"})), "c")
    add_ensemble(models, json.dumps({"ensemble": {"stpes": []}}), "d")
    text = json.loads(ensemble_text(*DIAMOND))
    add_ensemble(models, json.dumps(text | {"batching": {"max_batch_size": 3}}), "e")
    add_ensemble(models, json.dumps(text | {"versions": "all"}), "f")
    add_ensemble(models, ensemble_text(*DIAMOND), "sum")
    repository, _ = open_repository()
    reasons = {name: state.reasons.get(1, "") for name, state in repository.models.items()}
    assert reasons["b"] == "a circle of ensembles: b -> c -> b"
    assert reasons["c"] == "a circle of ensembles: c -> b -> c"
    assert "model `b` is not ready: a circle" in reasons["a"]
    assert "stpes" in reasons["d"]
    assert "`batching` is for its members" in reasons["e"]
    assert "an ensemble is one version" in reasons["f"]
    assert "its folder has bundles" in reasons["sum"]


def test_an_ensemble_that_is_not_ready_is_said_once(models: Path):
    """However often the repository is looked at."""
    add_ensemble(models, ensemble_text(step("nobody", {"x": "x"}, {"y": "y"})))
    messages: list[str] = []
    repository = Repository(models, PredictSettings(warm_up=False), PredictMetrics(), messages.append)
    for _ in range(3):
        repository.look()
    assert len([line for line in messages if line.startswith("diamond is not ready")]) == 1
    assert "nobody" in repository.models["diamond"].reasons[1]
    repository.close()


def test_outputs_may_be_chosen(models: Path, open_repository: Any):
    add_ensemble(models, ensemble_text(*DIAMOND, outputs=["doubled", "answer"]))
    _, service = open_repository()
    outputs = call(service)
    assert list(outputs) == ["doubled", "answer"]
    np.testing.assert_array_equal(outputs["doubled"], 2 * X)


@pytest.mark.parametrize(
    ("inputs", "problem"),
    [
        ({"x": X.astype(np.float64)}, "is float64"),
        ({"x": X[:, :2]}, r"has shape \[2, 2\]"),
        ({"y": X}, "no input `y`"),
        ({"x": X, "left": X}, "no input `left`"),
        ({"x": X[:0]}, "is 0"),
    ],
)
def test_inputs_are_checked_before_any_step(models: Path, open_repository: Any, inputs: dict[str, Any], problem: str):
    add_ensemble(models, ensemble_text(*DIAMOND))
    _, service = open_repository()
    with pytest.raises(ApiError, match=problem):
        call(service, **inputs)
    assert service.metrics.statistics("scaled", 1)["batches"] == 0


def test_members_come_and_go(models: Path, open_repository: Any):
    """Without a member, an ensemble is not ready and says why; with it again, it is. Loading an ensemble loads its members."""
    add_ensemble(models, ensemble_text(*DIAMOND))
    repository, service = open_repository()
    protocol = InferenceProtocol(service)
    old = service.find("diamond")
    asyncio.run(protocol.unload("projection", {}))
    assert repository.state("diamond").reasons == {1: "model `projection` is not ready: unloaded"}
    assert protocol.ready(), "what was asked for is no failure"
    # A request that found the ensemble before is refused too.
    with pytest.raises(ApiError, match="`projection` is not ready"):
        asyncio.run(service.call(None, lambda: old, {"x": X}, None))
    asyncio.run(protocol.load("projection", {}))
    np.testing.assert_allclose(call(service)["answer"], diamond(X), rtol=1e-6)
    asyncio.run(protocol.unload("diamond", {"unload_dependents": True}))
    assert {entry["state"] for entry in protocol.index(False)} == {"UNAVAILABLE"}
    asyncio.run(protocol.load("diamond", {}))
    np.testing.assert_allclose(call(service)["answer"], diamond(X), rtol=1e-6)
    # What a member computes changes with it, and a signature that no longer fits is found.
    (models / "projection" / "1").unlink()
    write_function(models / "projection" / "1", lambda h: {"z": -h @ WEIGHT}, h=jnp.zeros((1, 3)))
    repository.look()
    np.testing.assert_allclose(call(service)["answer"], -diamond(X), rtol=1e-6)
    write_function(models / "projection" / "2", lambda h: {"w": h @ WEIGHT}, h=jnp.zeros((1, 3)))
    repository.look()
    assert repository.state("diamond").reasons == {1: "step 2: `projection` has no output `z`"}


def test_a_pinned_version_is_the_one_that_answers(models: Path, open_repository: Any):
    steps = [dict(step) for step in DIAMOND]
    del steps[2]["version"]
    add_ensemble(models, ensemble_text(*DIAMOND), "pinned")
    add_ensemble(models, ensemble_text(*steps), "newest")
    repository, service = open_repository()
    np.testing.assert_allclose(call(service, "pinned")["answer"], diamond(X, 2.0), rtol=1e-6)
    np.testing.assert_allclose(call(service, "newest")["answer"], diamond(X, 3.0), rtol=1e-6)
    (models / "scaled" / "config.yml").write_text("versions: [2]\n")
    repository.look()
    assert "has no version `1`" in repository.state("pinned").reasons[1]
    np.testing.assert_allclose(call(service, "newest")["answer"], diamond(X, 3.0), rtol=1e-6)


def test_a_canceled_request_leaves_every_queue(models: Path, open_repository: Any):
    (models / "projection" / "config.yml").write_text("batching: {max_queue_delay_ms: 300}\n")
    add_ensemble(models, ensemble_text(*DIAMOND))
    repository, service = open_repository()

    async def ask() -> None:
        with pytest.raises(ApiError, match="took more than"):
            await service.call(None, lambda: service.find("diamond"), {"x": X}, None, 0.1)
        waiting = [len(version.batcher.waiting) for state in repository.models.values() for version in state.versions.values()]
        assert not any(waiting)
        await asyncio.sleep(0.4)

    asyncio.run(ask())
    assert service.metrics.statistics("projection", 1)["batches"] == 0
    assert service.find("diamond").batcher.idle


def test_texts_are_inputs_of_the_ensemble():
    """A member's text takes the place of the ids that a step makes of it, unless those are mapped."""
    spans = {"shape": ["batch", "length"], "dtype": "int32"}
    ids = [TensorSignature(name="tokens", **spans), TensorSignature(name="mask", default=1, **spans)]
    out = TensorSignature(name="vector", shape=["batch", 4], dtype="float32")
    of = BundleSignature(inputs=ids, outputs=[out], programs=[], weights=[], padding=["batch"], preprocess=[TokenizeStep()])
    for inputs, expected in (
        ({"text": "words"}, [("words", ["batch"], TEXTS)]),
        ({}, [("text", ["batch"], TEXTS)]),
        ({"tokens": "ids"}, [("ids", ["batch", "length"], "int32")]),
    ):
        plan = plan_ensemble(EnsembleSettings(steps=(EnsembleStep(model="encoder", input_map=inputs),)), [of])
        assert [(spec.name, spec.shape, spec.dtype) for spec in plan.signature.inputs] == expected
        assert batch_axis(plan.signature) == "batch"
    both = EnsembleStep(model="encoder", input_map={"tokens": "ids", "text": "text"})
    with pytest.raises(BadInput, match="map one of them"):
        plan_ensemble(EnsembleSettings(steps=(both,)), [of])


def test_axes_that_meet_are_the_same(bundles: Path):
    """Without a batch in one member there is none, and a size that meets an axis is its size."""
    opened = {name: Bundle.open(bundles / name / "1").manifest.signature() for name in ("scaled", "projection")}
    fixed = opened["scaled"].model_copy(deep=True)
    for spec in (*fixed.inputs, *fixed.outputs):
        spec.shape[0] = 4
    settings = EnsembleSettings(
        steps=(
            EnsembleStep(model="projection", input_map={"h": "doubled"}),
            EnsembleStep(model="scaled", output_map={"y": "doubled"}),
        )
    )
    plan = plan_ensemble(settings, [opened["projection"], fixed])
    assert [spec.shape for spec in (*plan.signature.inputs, *plan.signature.outputs)] == [[4, 3], [4, 2]]
    assert batch_axis(plan.signature) is None
    fixed.outputs[0].shape[0] = 5
    fixed.outputs[0].shape[1] = 4
    with pytest.raises(BadInput, match=r"`doubled` is \[batch, 3\] in step 1 \(`projection`\) and \[5, 4\] in step 2"):
        plan_ensemble(settings, [opened["projection"], fixed])


@pytest.mark.slow
def test_texts_go_through_an_encoder_and_a_head(tmp_path: Path, models: Path, open_repository: Any):
    config = FAMILIES["bert"].examples()["plain"].model_copy(update={"vocab": 30522})
    lm = LM(config, random_model(config, 0).module, find_tokenizer(str(shared("tokenizers/bert_uncased_vocab.txt"))))
    lm.save(tmp_path.parent / f"{tmp_path.name}-model")
    argosy.load(tmp_path.parent / f"{tmp_path.name}-model").export(models / "encoder" / "1", platforms=["cpu"])
    encoder = Bundle.open(models / "encoder" / "1")
    width = encoder.manifest.signature().outputs[0].shape[1]
    weight = np.random.default_rng(0).normal(size=(width, 3)).astype(np.float32)
    write_function(models / "head" / "1", lambda v: {"scores": v @ weight}, v=jnp.zeros((1, width)))
    steps = (step("encoder", {"text": "words"}, {"embedding": "vector"}), step("head", {"v": "vector"}, {"scores": "scores"}))
    add_ensemble(models, ensemble_text(*steps), "classifier")
    by_tokens = (step("encoder", {"tokens": "ids"}, {"embedding": "vector"}), steps[1])
    add_ensemble(models, ensemble_text(*by_tokens), "tokens")
    repository, service = open_repository()
    texts = ["a boat", "a ship on the sea", "rain"]
    expected = encoder.run({"text": texts})["embedding"] @ weight
    metadata = InferenceProtocol(service).metadata(repository.find("classifier"))
    assert metadata["inputs"] == [{"name": "words", "datatype": "BYTES", "shape": [-1]}]
    assert metadata["outputs"] == [{"name": "scores", "datatype": "FP32", "shape": [-1, 3]}]
    np.testing.assert_allclose(call(service, "classifier", words=texts)["scores"], expected, atol=1e-5)
    with pytest.raises(ApiError, match="input `words` is missing"):
        asyncio.run(service.call(None, lambda: service.find("classifier"), {}, None))
    with pytest.raises(ApiError, match="takes a list of texts"):
        call(service, "classifier", words=[])
    ids = InferenceProtocol(service).metadata(repository.find("tokens"))["inputs"]
    assert [(tensor["name"], tensor["datatype"], tensor["shape"]) for tensor in ids] == [("ids", "INT32", [-1, -1])]


def test_no_request_is_lost_while_a_member_is_replaced(models: Path, tmp_path_factory: pytest.TempPathFactory):
    add_ensemble(models, ensemble_text(step("scaled", {"x": "x"}, {"y": "h"}), step("projection", {}, {"z": "z"})), "chain")
    (models / "scaled" / "config.yml").write_text("versions: latest\n")
    staged = write_scaled(tmp_path_factory.mktemp("staged") / "3", 5.0)
    body = {"inputs": [{"name": "x", "shape": [2, 3], "datatype": "FP32", "data": X.tolist()}]}
    with serving(models, "poll=0.05") as (address, _):
        seen: set[float] = set()
        lost: list[str] = []
        stop = threading.Event()

        def ask() -> None:
            with httpx.Client(base_url=address, timeout=60) as other:
                while not stop.is_set():
                    answer = other.post("/v2/models/chain/infer", json=body)
                    if not answer.is_success:
                        lost.append(answer.text)
                        return
                    ratio = np.reshape(answer.json()["outputs"][0]["data"], (2, 2)) / (X @ WEIGHT)
                    seen.update(np.unique(ratio.round(4)).tolist())

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        until = time.monotonic() + 30
        while not (3.0 in seen or lost or time.monotonic() > until):
            time.sleep(0.02)
        staged.rename(models / "scaled" / "3")
        while not (5.0 in seen or lost or time.monotonic() > until):
            time.sleep(0.02)
        stop.set()
        for thread in threads:
            thread.join()
        assert lost == []
        assert seen == {3.0, 5.0}
