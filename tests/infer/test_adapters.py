"""Several adapters in one engine, against the same model with each adapter alone (`adapt.lora`)."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_weights import write_model

import argosy
from argosy.adapt.bank import AdapterIds, Bank
from argosy.adapt.quant import int8
from argosy.adapt.surgery import find, swap
from argosy.core.errors import BadInput, Unsupported
from argosy.infer import prompt_logprobs as prompts_module
from argosy.infer.cpu.views import is_on_one_cpu
from argosy.infer.engine.adapters import Adapters, UnknownAdapter
from argosy.infer.engine.cached_engine import EngineRoom
from argosy.infer.engine.engine import Engine
from argosy.infer.engine.request import Request
from argosy.infer.forward.passes import OneProgram, _one_program
from argosy.infer.lm import LM
from argosy.infer.load import load_lm
from argosy.infer.prompt_logprobs import PromptScorer
from argosy.infer.settings import EngineSettings
from argosy.models import FAMILIES
from argosy.models.parts.einsum import Einsum, Route
from argosy.models.parts.stack import Scan, Unroll
from argosy.models.parts.stack.addresses import from_layers
from argosy.models.parts.weight import Meaning, put, split
from argosy.weights import build as loading
from argosy.weights.build import random_model
from argosy.weights.peft.attach import put_adapter
from argosy.weights.peft.sites import Adapter, sites

ADAPTERS = Path(__file__).parents[1] / "goldens" / "adapters"
# Those of LoRA: an adapter of DoRA has no place beside others.
GOLDENS = sorted(folder.parent.name for folder in ADAPTERS.glob("*/adapter_config.json") if '"use_dora": false' in folder.read_text())
SIZES = {"slots": 4, "page": 8, "context": 96, "pages": 40, "budget": 32, "budget_decoding": 32}
ON = EngineSettings(**SIZES, lora={"enabled": True, "adapters": 3, "rank": 4})


def module_of(family: str, example: str, run: Any = None) -> Any:
    """The same weights in any layout."""
    config = FAMILIES[family].examples()[example]
    model = random_model(config, 0, run=Unroll()).module
    if run is None:
        return model
    other = config.build(run)
    put(other, {address: jnp.asarray(a) for address, a in from_layers(other, split(model)[1]).items()})
    other.dtype = model.dtype
    return other


def adapter_of(model: Any, seed: int, rank: int, where: str = r"layers\..*", gain: float = 0.7) -> dict[str, Adapter]:
    """Random factors on every contraction of an unrolled model that matches and that PEFT has a name for."""
    rng = np.random.default_rng(seed)
    weight_names = {name for site in sites(model.config) for name in site.weights}
    out = {}
    for name, of in find(model, where).items():
        if name not in weight_names or "R" in of.inner:
            continue
        sizes, outer = of.sizes | {"r": rank}, "".join(a for a in of.spec if a in of.out)
        a, b = ([sizes[letter] for letter in letters] for letters in (of.group + of.inner + "r", of.group + "r" + outer))
        fan_in = int(np.prod([sizes[letter] for letter in of.inner]))
        out[name] = Adapter(
            rng.standard_normal(a).astype(np.float32) * fan_in**-0.5, rng.standard_normal(b).astype(np.float32), gain
        )
    return out


def prompts(vocab: int, *lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocab, n).tolist() for n in lengths]


def generate_events(engine: Engine, requests: list[Request]) -> list[list[Any]]:
    events = engine.generate(requests)
    assert engine.pages.free == engine.pages.count
    return events


def assert_of(module: Any, request: Request, events: list[Any]) -> None:
    """The likeliest tokens of each event are those of the whole sequence through this module, to rounding."""
    ids = [*request.tokens, *(event.token for event in events)]
    logits = LM(module.config, module).logits([ids])[0].astype(np.float64)
    expected = np.asarray(jax.nn.log_softmax(logits, -1))[len(request.tokens) - 1 : -1]
    for event, row in zip(events, expected, strict=True):
        tokens, logprobs = zip(*event.top)
        np.testing.assert_allclose(logprobs, row[list(tokens)], atol=2e-5, rtol=1e-5)


def logprobs_of(module: Any, ids: list[int]) -> np.ndarray:
    """The log-probability of each token after the first, through this module."""
    logits = LM(module.config, module).logits([ids])[0].astype(np.float64)
    return np.asarray(jax.nn.log_softmax(logits, -1))[np.arange(len(ids) - 1), ids[1:]]


@pytest.fixture(scope="module")
def plain() -> Any:
    return module_of("llama", "plain")


@pytest.fixture(scope="module")
def engine(plain: Any) -> Engine:
    """One warm engine for all tests; each leaves no adapter behind."""
    engine = Engine(plain, ON)
    engine.warm_up()
    return engine


@pytest.fixture
def three(plain: Any, engine: Engine) -> Any:
    """Adapters of ranks 1, 4 and 3 under the names a, b and c, and the model with each alone."""
    modules = {None: plain}
    for i, (name, rank) in enumerate((("a", 1), ("b", 4), ("c", 3))):
        factors = adapter_of(plain, i, rank)
        engine.adapters.put(name, engine.adapters.packed(factors))
        modules[name] = module_of("llama", "plain")
        put_adapter(modules[name], factors)
    yield modules
    for name in list(engine.adapters.loaded):
        engine.unload_adapter(name)


@pytest.mark.slow
def test_each_request_of_a_mixed_batch_is_as_with_its_adapter_alone(plain: Any, engine: Engine, three: Any):
    token_rows = prompts(plain.config.vocab, 5, 40, 17, 3, 9, 21)
    requests = [Request(p, 6, top=20, adapter=name) for p, name in zip(token_rows, ("a", None, "b", "c", "b", None))]
    for request, events in zip(requests, generate_events(engine, requests), strict=True):
        assert_of(three[request.adapter], request, events)


def test_pages_are_shared_under_one_adapter_and_never_by_two(plain: Any, engine: Engine, three: Any):
    prompt = prompts(plain.config.vocab, 40)[0]
    for name, reused in (("a", 0), (None, 0), ("b", 0), ("a", 39), (None, 39)):
        before = engine.stats.reused_tokens
        request = Request(prompt, 4, top=20, adapter=name, salt="own")
        assert_of(three[name], request, generate_events(engine, [request])[0])
        assert engine.stats.reused_tokens - before == reused, name
    number = engine.adapters.loaded["a"].number
    before = engine.stats.reused_tokens
    generate_events(engine, [Request(prompt, 1, salt=f"{number}:own")])
    assert engine.stats.reused_tokens == before, "a salt that imitates an adapter's"


@pytest.mark.slow
def test_drafts_are_verified_under_the_adapter_of_their_sequence(plain: Any):
    engine = Engine(plain, EngineSettings(**SIZES, lora=ON.lora.model_dump(), speculative={"method": "ngram", "lookup_min": 1}))
    factors, adapted = adapter_of(plain, 3, 4), module_of("llama", "plain")
    put_adapter(adapted, factors)
    engine.adapters.put("x", engine.adapters.packed(factors))
    requests = [Request([7, 8, 9] * 5, 12, top=20, adapter=name) for name in ("x", None)]
    for request, events in zip(requests, generate_events(engine, requests), strict=True):
        assert_of(adapted if request.adapter else plain, request, events)
    assert engine.speculation.drafted


def test_nothing_compiles_as_adapters_come_and_go(plain: Any, engine: Engine, compilations: list[str]):
    token_rows = prompts(plain.config.vocab, 5, 20)
    for seed in range(2):
        engine.adapters.put("one", engine.adapters.packed(adapter_of(plain, seed, 2)))
        generate_events(engine, [Request(p, 3, adapter=name) for p in token_rows for name in ("one", None)])
        engine.unload_adapter("one")
        if not seed:
            # The first request of a process reads random keys.
            compilations.clear()
    assert not compilations


def test_the_listener_hears_compilations(compilations: list[str]):
    jax.jit(lambda x: x * 3 + 0.123)(np.arange(7.0))
    assert compilations


def test_an_engine_without_adapters_runs_the_plain_program(plain: Any):
    engine = Engine(plain, EngineSettings(**SIZES))
    assert engine.adapters is None
    graph, weights = split(plain)
    whole = OneProgram(plain)
    assert whole.program(whole.step_kind) is _one_program(graph, plain.dtype, whole.step_kind)
    assert sorted(engine.runner.forward.prepared(weights)[0]) == ["embed.w", "head.w", "norm.scale"]
    assert {address for layer in engine.runner.forward.prepared(weights)[1] for address in layer} == {
        address.split(".", 2)[2] for address in weights if address.startswith("layers.")
    }
    with pytest.raises(UnknownAdapter, match="takes no adapters"):
        engine.add(Request([1], 1, adapter="a"))


# ---------------------------------------------------------------- whole sequences


def test_prompts_are_scored_under_their_adapter_and_nothing_compiles(
    monkeypatch: pytest.MonkeyPatch, plain: Any, engine: Engine, three: Any, compilations: list[str]
):
    monkeypatch.setattr(prompts_module, "PASS", 16)
    scorer = PromptScorer(plain, 96, adapters=engine.adapters)
    long, short = prompts(plain.config.vocab, 40, 9)
    expected = {name: [logprobs_of(module, ids) for ids in (long, short)] for name, module in three.items()}
    scorer.compile(scorer.sizes_of([long, short]))
    compilations.clear()
    for name in ("a", None, "b", "a"):
        under = engine.adapters.loaded[name] if name else None
        passes_scored = [[scorer.score([ids], under) for _ in range(passes)][-1] for ids, passes in ((long, 3), (short, 1))]
        for (scored,), logprobs in zip(passes_scored, expected[name], strict=True):
            np.testing.assert_allclose(scored.logprobs, logprobs, atol=2e-5, rtol=1e-5)
    assert not compilations


def test_prompts_of_two_adapters_share_no_pass(plain: Any, engine: Engine, three: Any):
    scorer = PromptScorer(plain, 96, adapters=engine.adapters)
    ids = prompts(plain.config.vocab, *[20] * 12)
    a, b = engine.adapters.loaded["a"], engine.adapters.loaded["b"]
    scorer.compile({(8, 32)})
    assert scorer.batch(ids, [a, b] * 6) == [0, 2, 4, 6, 8, 10]
    assert scorer.batch(ids, [None, *[b] * 11]) == [0]


CASES = [
    pytest.param("llama", "plain", Scan(), True, "int8", id="views of stacked layers, int8 below", marks=pytest.mark.slow),
    pytest.param("llama", "plain", Scan(), False, "", id="scanned"),
    pytest.param("gemma", "3", Scan(), False, "", id="scanned, with windows", marks=pytest.mark.slow),
    pytest.param("llama", "plain", None, False, "", id="one program", marks=pytest.mark.slow),
    pytest.param("mixtral", "plain", None, True, "", id="experts", marks=pytest.mark.slow),
    pytest.param("mixtral", "plain", Scan(), False, "", id="scanned experts", marks=pytest.mark.slow),
    pytest.param("deepseek", "2-lite", None, True, "", id="latents", marks=pytest.mark.slow),
    pytest.param("qwen3_next", "mixed", None, True, "", id="recurrence", marks=pytest.mark.slow),
    pytest.param("gpt2", "untied", None, True, "", id="biases", marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize("family, example, run, by_layer, below", CASES)
def test_every_structure_and_layout(monkeypatch, family: str, example: str, run: Any, by_layer: bool, below: str):
    monkeypatch.setattr("argosy.infer.forward.passes.is_on_one_cpu", lambda weights: by_layer)
    served, modules = module_of(family, example, run), {None: module_of(family, example), "x": module_of(family, example)}
    for module in (served, *modules.values()) if below else ():
        swap(module, r"layers\..*(up|q)", int8)
    engine, factors = Engine(served, ON), adapter_of(modules[None], 5, 3)
    put_adapter(modules["x"], factors)
    engine.adapters.put("y", engine.adapters.packed(adapter_of(modules[None], 6, 2)))
    engine.adapters.put("x", engine.adapters.packed(factors))
    requests = [Request(p, 3, top=20, adapter=name) for p in prompts(served.config.vocab, 5, 29) for name in ("x", None)]
    for request, events in zip(requests, generate_events(engine, [*requests]), strict=True):
        assert_of(modules[request.adapter], request, events)


@pytest.mark.slow
def test_head_and_embedding_carry_adapters_where_the_settings_say_so():
    plain, other = module_of("llama", "plain"), module_of("llama", "plain")
    settings = EngineSettings(**SIZES, lora={"enabled": True, "rank": 4, "where": r"layers\..*attn.*|head|embed"})
    engine, factors = Engine(plain, settings), adapter_of(plain, 0, 2, r"layers\..*attn.*|head|embed")
    assert {"head", "embed"} <= set(factors)
    put_adapter(other, factors)
    engine.adapters.put("x", engine.adapters.packed(factors))
    requests = [Request(p, 3, top=20, adapter=name) for p in prompts(113, 5, 29) for name in ("x", None)]
    for request, events in zip(requests, generate_events(engine, requests), strict=True):
        assert_of(other if request.adapter else plain, request, events)
    with pytest.raises(BadInput, match=r"carry none here.*mlp"):
        engine.adapters.packed(adapter_of(plain, 0, 2))


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "phi3-window" else pytest.mark.slow) for n in GOLDENS])
def test_a_folder_of_the_peft_library_gives_its_logits(name: str, tmp_path):
    lm = load_lm(write_model(ADAPTERS.parent / "models" / name, tmp_path / "base"))
    golden = dict(np.load(ADAPTERS / name / "golden.npz"))
    engine = Engine(lm.module, EngineSettings(**SIZES, lora={"enabled": True, "where": ".*"}))
    if json.loads((ADAPTERS / name / "adapter_config.json").read_text())["modules_to_save"]:
        with pytest.raises(Unsupported, match="modules trained in full beside other adapters"):
            engine.load_adapter("golden", ADAPTERS / name)
        return
    engine.load_adapter("golden", ADAPTERS / name)
    for ids, logits in zip(golden["tokens"], golden["logits"], strict=True):
        event = generate_events(engine, [Request(ids.tolist(), 1, top=20, adapter="golden")])[0][0]
        tokens, logprobs = zip(*event.top)
        expected = np.asarray(jax.nn.log_softmax(logits[-1].astype(np.float64)))[list(tokens)]
        np.testing.assert_allclose(logprobs, expected, atol=1e-4)


def test_dora_has_no_place_beside_other_adapters(plain: Any, engine: Engine):
    magnitudes = {name: of._replace(m=np.ones(3, np.float32)) for name, of in adapter_of(plain, 0, 2).items()}
    with pytest.raises(Unsupported, match="DoRA beside other adapters"):
        engine.adapters.packed(magnitudes)


def test_experts_carry_an_adapter_each():
    """A grouped weight, whose rows are sorted by expert: the adapter of a row is that of its token."""
    E, D, M, T, k, rng = 4, 12, 10, 7, 2, np.random.default_rng(0)
    of = Einsum("XD,EDM->XM", {"E": E, "D": D, "M": M})
    put_random(of, rng)
    adapter_ids = np.asarray([[0, 1, -1, 0, 1, 1, -1]], np.int32)
    bank = Bank(of, 2, 3, AdapterIds(jnp.asarray(adapter_ids), meaning=Meaning("BT")))
    put_random(bank, rng)
    expert = rng.integers(0, E, T * k)
    order = np.argsort(expert, kind="stable")
    x = rng.standard_normal((T, D)).astype(np.float32)
    route = Route(jnp.bincount(jnp.asarray(expert), length=E), jnp.asarray(expert[order]), token=jnp.asarray(order // k))
    outputs = bank(jnp.asarray(x)[order // k], route)
    for row, at in enumerate(order):
        token, e, place = at // k, expert[at], adapter_ids[0, at // k]
        expected = x[token] @ np.asarray(of.w[...])[e]
        if place >= 0:
            expected = expected + x[token] @ np.asarray(bank.a[...])[e, :, place] @ np.asarray(bank.b[...])[e, place]
        np.testing.assert_allclose(outputs[row], expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="tokens of these rows are not known"):
        bank(jnp.asarray(x)[order // k], route._replace(token=None))


def put_random(module: Any, rng: Any) -> None:
    for name in ("w", "a", "b"):
        if (v := getattr(module, name, None)) is not None:
            v.set_value(jnp.asarray(rng.standard_normal(v.shape), jnp.float32))


# ---------------------------------------------------------------- what is refused


def change_factors(factors: dict[str, Adapter], **changes: Any) -> dict[str, Adapter]:
    name = next(iter(factors))
    return factors | {name: factors[name]._replace(**changes)}


def test_an_adapter_that_does_not_fit_changes_nothing(plain: Any, engine: Engine):
    good = adapter_of(plain, 0, 2)
    first = good[next(iter(good))]
    wrong = {
        r"rank 5 is above the maximum of 4: layers": adapter_of(plain, 0, 5),
        r"1 of the adapter's contractions carry none here: layers\.7\.attn\.q": good | {"layers.7.attn.q": first},
        r"layers.*factors of \(3, 2\) for a weight that takes": change_factors(good, a=np.ones((3, 2), np.float32)),
        r"layers.*not finite": change_factors(good, b=np.full_like(first.b, np.nan)),
    }
    before = {address: np.asarray(a) for address, a in engine.adapters.arrays.items()}
    for problem, factors in wrong.items():
        with pytest.raises(BadInput, match=problem):
            engine.adapters.put("wrong", engine.adapters.packed(factors))
    assert not engine.adapters.loaded
    for address, a in engine.adapters.arrays.items():
        np.testing.assert_array_equal(a, before[address])


@pytest.mark.parametrize("key, value", [("use_qalora", True), ("bias", "all"), ("target_parameters", ["w"])])
def test_adapters_that_change_more_are_refused_by_name(plain: Any, engine: Engine, tmp_path, key: str, value: Any):
    shutil.copytree(ADAPTERS / "llama-grouped", tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {key: value}))
    with pytest.raises(Unsupported, match=f"error: {key} = ") as error:
        engine.load_adapter("wrong", tmp_path / "adapter")
    assert str(tmp_path) not in error.value.what
    assert not engine.adapters.loaded


def test_places_and_names_are_taken_once(plain: Any, engine: Engine, three: Any):
    factors = engine.adapters.packed(adapter_of(plain, 9, 1))
    with pytest.raises(BadInput, match="`a` is loaded already"):
        engine.adapters.put("a", factors)
    with pytest.raises(BadInput, match="all 3 places for adapters are taken"):
        engine.adapters.put("d", factors)
    with pytest.raises(UnknownAdapter, match="no adapter `d`"):
        engine.unload_adapter("d")
    with pytest.raises(UnknownAdapter, match="no adapter `d`"):
        engine.add(Request([1], 1, adapter="d"))
    assert not engine.busy


# ---------------------------------------------------------------- while requests run


def test_requests_finish_with_the_adapter_they_began_with(plain: Any, engine: Engine, three: Any):
    """Unloaded and replaced while two requests run and one waits for a slot; the place is free when the last has ended."""
    token_rows = prompts(plain.config.vocab, 5, 9, 6, 8, 7)
    requests = [Request(p, 6, top=20, adapter="a") for p in token_rows]
    numbers = [engine.add(request) for request in requests]
    engine.step()
    place = engine.adapters.loaded["a"].place
    engine.unload_adapter("a")
    with pytest.raises(UnknownAdapter):
        engine.add(Request([1], 1, adapter="a"))
    spare = engine.adapters.packed(adapter_of(plain, 7, 2))
    with pytest.raises(BadInput, match="1 of them by adapters that are unloaded and still answer"):
        engine.adapters.put("d", spare)
    events_of: dict[int, list[Any]] = {number: [] for number in numbers}
    for event in engine.run():
        events_of[event.id].append(event)
    for request, number in zip(requests, numbers, strict=True):
        assert_of(three["a"], request, events_of[number])
    assert engine.adapters.put("d", spare).place == place


def test_an_aborted_request_frees_the_place_of_its_adapter(plain: Any, engine: Engine, three: Any):
    number = engine.add(Request([1, 2, 3], 50, adapter="a"))
    engine.step()
    engine.unload_adapter("a")
    engine.abort(number)
    engine.adapters.put("d", engine.adapters.packed(adapter_of(plain, 7, 2)))
    assert [event.finish_reason for event in engine.run()] == ["abort"]


def test_a_replaced_adapter_serves_new_requests_beside_old_ones(plain: Any, engine: Engine, three: Any):
    engine.unload_adapter("c")
    old = Request(prompts(plain.config.vocab, 20)[0], 8, top=20, adapter="a")
    number = engine.add(old)
    engine.step()
    factors = adapter_of(plain, 8, 4)
    engine.adapters.put("a", engine.adapters.packed(factors), replace=True)
    newer = module_of("llama", "plain")
    put_adapter(newer, factors)
    new = Request(old.tokens, 3, top=20, adapter="a")
    second = engine.add(new)
    events_of: dict[int, list[Any]] = {number: [], second: []}
    for event in engine.run():
        events_of[event.id].append(event)
    assert_of(three["a"], old, events_of[number])
    assert_of(newer, new, events_of[second])


def test_swapped_weights_keep_the_adapters(plain: Any, engine: Engine, three: Any):
    request = Request(prompts(plain.config.vocab, 20)[0], 4, top=20, adapter="b")
    generate_events(engine, [request])
    old = engine.weights()
    other = split(random_model(plain.config, 1, run=Unroll()).module)[1]
    try:
        engine.swap_weights(other)
        module = random_model(plain.config, 1, run=Unroll()).module
        put_adapter(module, adapter_of(plain, 1, 4))
        assert_of(module, request, generate_events(engine, [request])[0])
    finally:
        engine.swap_weights(old)


def test_the_model_with_banks_holds_no_weights(plain: Any):
    """Those of the model would stay in memory after a swap."""
    banked = Adapters(ON.lora, plain, 4).on(plain)
    assert all(isinstance(a, jax.ShapeDtypeStruct) for a in split(banked)[1].values())
    assert len(find(banked, r"layers\..*", Bank)) == 7 * plain.config.layers


# ---------------------------------------------------------------- from Python


@pytest.fixture(scope="module")
def folders(plain: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model, and adapters of ranks 2 and 4, as `lm.save` writes them."""
    base = tmp_path_factory.mktemp("python")
    LM(plain.config, plain).save(base / "model")
    for seed, (name, rank) in enumerate((("a", 2), ("b", 4))):
        module = module_of("llama", "plain")
        put_adapter(module, adapter_of(plain, seed, rank))
        LM(plain.config, module).save(base / name, format="peft")
    return {name: base / name for name in ("model", "a", "b")}


@pytest.fixture(scope="module")
def lm(folders: dict[str, Path]) -> LM:
    lm_with_adapters = argosy.load(folders["model"], engine={"lora": {"enabled": True, "adapters": 2, "rank": 4}})
    for name in ("a", "b"):
        lm_with_adapters.load_adapter(name, folders[name])
    return lm_with_adapters


@pytest.fixture(scope="module")
def merged_lms(folders: dict[str, Path]) -> dict[str | None, LM]:
    """The model, and the model with each adapter merged into its weights."""
    out = {None: load_lm(folders["model"])} | {name: load_lm(folders["model"], adapter=folders[name]) for name in ("a", "b")}
    for name in ("a", "b"):
        out[name].merge()
    return out


def test_a_model_loaded_with_an_adapter_has_its_factors_where_its_weights_are(
    merged_lms: dict[str | None, LM], folders: dict[str, Path]
):
    """As NumPy arrays they went to the device in every step, and a CPU compiled whole models."""
    adapted = load_lm(folders["model"], adapter=folders["a"])
    assert is_on_one_cpu(split(adapted.module)[1])
    two = load_lm(folders["model"], adapter=folders["a"], tensor=2)
    weights = {address: a for address, a in split(two.module)[1].items() if "layers.0.attn" in address}
    shared = {address.split(".", 3)[3] for address, a in weights.items() if a.sharding.shard_shape(a.shape) != a.shape}
    assert all(len(a.devices()) == 2 for a in weights.values())
    assert {name for name in shared if not name.endswith(".w")} == {"q.b", "k.b", "v.b", "o.a"}
    ids = prompts(two.config.vocab, 9)
    np.testing.assert_allclose(two.score(ids)[0], merged_lms["a"].score(ids)[0], atol=1e-4)


@pytest.mark.slow
def test_the_handle_answers_and_scores_as_the_merged_model_does(lm: LM, merged_lms: dict[str | None, LM]):
    assert sorted(lm.adapters) == ["a", "b"]
    token_rows = prompts(lm.config.vocab, 5, 40, 17)
    for name, other in merged_lms.items():
        for answer, expected in zip(lm.generate(token_rows, 6, top=3, adapter=name), other.generate(token_rows, 6, top=3), strict=True):
            assert answer.tokens == expected.tokens
            np.testing.assert_allclose(answer.logprobs, expected.logprobs, atol=1e-4)
        for scores in zip(lm.score(token_rows, adapter=name), other.score(token_rows), strict=True):
            np.testing.assert_allclose(*scores, atol=1e-4)
    beams = [
        model.beam_search(token_rows[:1], 3, beam_width=2, **kwargs)[0]
        for model, kwargs in ((lm, {"adapter": "b"}), (merged_lms["b"], {}))
    ]
    assert [beam.tokens for beam in beams[0]] == [beam.tokens for beam in beams[1]]
    differ = [np.concatenate(lm.score(token_rows, adapter=name)) for name in (None, "a", "b")]
    assert all(np.abs(x - y).max() > 1e-2 for x, y in ((differ[0], differ[1]), (differ[1], differ[2])))


@pytest.mark.slow
def test_answers_under_several_adapters_are_read_in_turn_while_one_is_unloaded(
    lm: LM, merged_lms: dict[str | None, LM], folders: dict[str, Path]
):
    """The second needs a larger engine, and the first goes on in the old one, whose place nobody else gets."""
    lm._held._room = EngineRoom(1, 32, 0)
    lm._held._engine = None
    short, long = prompts(lm.config.vocab, 7, 30)
    first = lm.pieces([short], 8, adapter="a")
    next(iter(first))
    old = lm._held._engine
    second = lm.pieces([long], 8, adapter="b")
    next(iter(second))
    assert lm._held._engine is not old
    lm.unload_adapter("a")
    try:
        with pytest.raises(BadInput, match="1 of them by adapters that are unloaded and still answer"):
            lm.load_adapter("c", folders["b"])
        with pytest.raises(UnknownAdapter, match="no adapter `a` is loaded"):
            lm.generate([short], adapter="a")
        for answers in (first, second):
            list(answers)
        assert first.completions[0].tokens == merged_lms["a"].generate([short], 8)[0].tokens
        assert second.completions[0].tokens == merged_lms["b"].generate([long], 8)[0].tokens
    finally:
        lm.load_adapter("a", folders["a"])


@pytest.mark.slow
def test_adapters_outlive_surgery(folders: dict[str, Path]):
    lm = argosy.load(folders["model"], engine={"lora": {"enabled": True, "rank": 4}})
    lm.load_adapter("a", folders["a"])
    prompt = prompts(lm.config.vocab, 9)
    before = lm.score(prompt, adapter="a")[0]
    swap(lm.module, r"layers\..*(up|q)", int8)
    adapted = lm.score(prompt, adapter="a")[0]
    later = argosy.load(folders["model"], engine=lm.engine_settings)
    swap(later.module, r"layers\..*(up|q)", int8)
    later.load_adapter("a", folders["a"])
    np.testing.assert_array_equal(adapted, later.score(prompt, adapter="a")[0])
    assert 1e-4 < np.abs(adapted - before).max() < 0.3
    assert np.abs(adapted - lm.score(prompt)[0]).max() > 1e-2


def test_the_handle_refuses_what_it_has_no_room_for(lm: LM, folders: dict[str, Path]):
    with pytest.raises(BadInput, match="`a` is loaded already"):
        lm.load_adapter("a", folders["b"])
    with pytest.raises(BadInput, match="all 2 places for adapters are taken"):
        lm.load_adapter("c", folders["b"])
    with pytest.raises(UnknownAdapter, match="no adapter `c`"):
        lm.unload_adapter("c")
    assert sorted(lm.adapters) == ["a", "b"]
    without = LM(lm.config, lm.module)
    for ask in (lambda: without.load_adapter("a", folders["a"]), lambda: without.generate([[1]], adapter="a")):
        with pytest.raises(UnknownAdapter, match=r"no room for adapters\n\nhint: .*engine=\{.lora.: \{.enabled.: True"):
            ask()


@pytest.mark.slow
def test_the_handle_scores_in_the_layout_of_several_steps_at_a_time(lm: LM, folders: dict[str, Path]):
    """Such an engine runs stacked layers as they are on a CPU too, where others take views of them."""
    settings = EngineSettings(steps=2, slots=1, context=32, budget=32, lora={"enabled": True, "rank": 4})
    other = load_lm(folders["model"], run=Scan(), engine=settings)
    other.load_adapter("a", folders["a"])
    ids = prompts(lm.config.vocab, 9)
    answer = other.generate(ids, 5, adapter="a")[0]
    assert answer.tokens == lm.generate(ids, 5, adapter="a")[0].tokens
    np.testing.assert_allclose(other.score(ids, adapter="a")[0], lm.score(ids, adapter="a")[0], atol=1e-4)


# ---------------------------------------------------------------- several devices


def on_two_devices(module: Any) -> Any:
    places = loading.tensor_shardings(module, 2)
    put(module, {address: jax.device_put(a, places[address]) for address, a in split(module)[1].items()})
    return module


def factors_split(engine: Engine) -> set[str]:
    """The factors of which a device has a part."""
    arrays = {address: a for address, a in engine.adapters.arrays.items() if a.sharding.shard_shape(a.shape) != a.shape}
    return {address.split(".", 2)[2] for address in arrays}


@pytest.mark.slow
def test_adapters_on_two_devices_are_split_as_their_weights_and_stay_so(
    monkeypatch: pytest.MonkeyPatch, plain: Any, three: Any, compilations: list[str]
):
    monkeypatch.setattr(prompts_module, "PASS", 16)
    # Without reuse: a prompt that is known already takes another program.
    small = {"slots": 2, "page": 8, "context": 32, "budget": 64, "budget_decoding": 32, "reuse": False}
    settings = EngineSettings(**small, lora={"enabled": True, "adapters": 2, "rank": 4})
    engine = Engine(on_two_devices(module_of("llama", "plain", Scan())), settings)
    # Of one length, so that no step has one row: that would be four further programs.
    token_rows = prompts(plain.config.vocab, 9, 9, 29)
    scorer = PromptScorer(engine.model, 32, adapters=engine.adapters)
    split_ = {"attn.q.b", "attn.k.b", "attn.v.b", "attn.o.a", "mlp.gate.b", "mlp.up.b", "mlp.down.a"}
    assert factors_split(engine) == split_
    ranks = {"a": (0, 1), "b": (1, 4), "c": (2, 3)}
    for turn, names in enumerate((("a", "b"), ("c", "b"), ("a", "c"))):
        compilations.clear()
        for name in set(names) - set(engine.adapters.loaded):
            engine.adapters.put(name, engine.adapters.packed(adapter_of(plain, *ranks[name])))
        requests = [Request(ids, 3, top=20, adapter=name) for ids, name in zip(token_rows, names)]
        answers = generate_events(engine, requests)
        ((scored,),) = [scorer.score([token_rows[2]], engine.adapters.loaded[names[0]]) for _ in range(2)][1:]
        assert factors_split(engine) == split_
        assert not turn or not compilations
        for request, events in zip(requests, answers, strict=True):
            assert_of(three[request.adapter], request, events)
        np.testing.assert_allclose(scored.logprobs, logprobs_of(three[names[0]], token_rows[2]), atol=2e-5, rtol=1e-5)
        for name in {0: ("a",), 1: ("b",), 2: ()}[turn]:
            engine.unload_adapter(name)


DEVICES = [("llama", "plain", 2), ("mixtral", "plain", 2), ("deepseek", "2-lite", 2), ("qwen3_next", "mixed", 3)]


@pytest.mark.slow
@pytest.mark.parametrize("run", [None, Scan()], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("family, example, count", DEVICES)
def test_several_devices_answer_with_adapters_as_one_does_and_compile_nothing_later(
    family: str, example: str, count: int, run: Any, compilations: list[str]
):
    alone, shared = Engine(module_of(family, example), ON), module_of(family, example, run)
    places = loading.tensor_shardings(shared, count)
    put(shared, {address: jax.device_put(a, places[address]) for address, a in split(shared)[1].items()})
    factors = {name: adapter_of(alone.model, seed, 3) for seed, name in enumerate("xy")}
    engine = Engine(shared, ON)
    engine.warm_up()
    token_rows = prompts(alone.model.config.vocab, 5, 29, 9, 17)
    outputs = []
    for runner in (alone, engine):
        compilations.clear()
        for name, factors_of in factors.items():
            runner.adapters.put(name, runner.adapters.packed(factors_of))
        requests = [Request(ids, 4, adapter=name) for ids, name in zip(token_rows, ("x", None, "y", "x"), strict=True)]
        outputs.append([[event.token for event in events] for events in generate_events(runner, requests)])
    assert outputs[0] == outputs[1]
    assert not compilations
