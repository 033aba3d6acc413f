"""A quantized cache: the engine answers as the whole sequence does with every key and value rounded once, whoever else is there.

Models compute in float64 here. In float32 two ways to one number differ by 1e-7, which moves one value in 10,000 to the next of its 255
steps; the answer then differs by as little as rounding differs, but not by nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laws.families import forward, in_float64, tokens_of
from ops.test_narrow import rounded

from argosy.core.errors import BadInput, SettingsError
from argosy.core.settings import read_settings, words_layer
from argosy.infer.engine import cache
from argosy.infer.engine.cache import CacheSize, cache_needs
from argosy.infer.engine.engine import Engine
from argosy.infer.engine.request import Request
from argosy.infer.engine.runner import Runner
from argosy.infer.placement import home_mesh
from argosy.infer.sampling.sampler import sample
from argosy.infer.settings import MTP, DraftModel, EngineSettings, NGram
from argosy.infer.speculation.speculate import verify
from argosy.models import FAMILIES
from argosy.models.parts.attention import attend
from argosy.models.parts.attention.attend import Packed, Paged
from argosy.models.parts.attention.cache import Spec, bytes_of_caches, empty_pools
from argosy.models.parts.stack import Scan, Unroll
from argosy.models.parts.weight import merge, put, split
from argosy.ops.narrow import FORMS, Narrow
from argosy.weights.build import random_model, tensor_shardings

# 13 pages of 8 tokens hold no four of the sequences here.
TIGHT = EngineSettings(slots=4, page=8, context=96, pages=13, budget=64, budget_decoding=32)
LONG = 64  # tokens of a prompt and its answer, at most
MOST = 20


def step_program(engine: Engine) -> Any:
    """The program of its steps, where that is one."""
    forward: Any = engine.runner.forward
    return forward.program(forward.step_kind)


def slow(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


# Grouped queries; latents with an indexer; windows; experts; recurrent states beside attention; sinks.
STRUCTURES = [
    ("llama", "plain", "int8"),
    slow("deepseek", "3.2", "fp8_e4m3"),
    slow("llama", "plain", "fp8_e4m3"),
    slow("llama", "plain", "fp8_e5m2"),
    slow("gemma", "3", "int8"),
    slow("deepseek", "2-lite", "int8"),
    slow("deepseek", "3.2", "int8"),
    slow("mixtral", "plain", "int8"),
    slow("qwen3_next", "mixed", "int8"),
    slow("gpt_oss", "plain", "int8"),
]


@contextmanager
def float64() -> Iterator[None]:
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def module_of(family: str, example: str) -> Any:
    """A random model in float64, which has to be enabled."""
    module = random_model(FAMILIES[family].examples()[example], 0).module
    put(module, {address: jnp.asarray(np.asarray(w), jnp.float64) for address, w in split(module)[1].items()})
    module.dtype = jnp.float64
    return module


def in_float32(logits: Any) -> Any:
    """Logits, or a description of them, where programs are compiled ahead."""
    if isinstance(logits, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(logits.shape, jnp.float32, sharding=logits.sharding)
    return logits.astype(jnp.float32)


@pytest.fixture(autouse=True)
def _sampler_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler compares the 32 bits of logits, also where the model computes in float64."""
    run = Runner.run

    def rounded(self: Runner, label: str, program: Any, sizes: tuple[Any, ...], *arguments: Any) -> Any:
        if program in (sample, verify):
            arguments = (arguments[0], in_float32(arguments[1]), *arguments[2:])
        return run(self, label, program, sizes, *arguments)

    monkeypatch.setattr(Runner, "run", rounded)


def page_bytes(specs: Any, page: int, dtype: Any, form: str | None, mesh: Any = None, longest: int = 96) -> int:
    """Bytes of a page on each device."""
    needs = cache_needs(specs, EngineSettings(page=page, cache_dtype=form), dtype, longest)
    return needs.bytes(mesh, CacheSize(1, {}))


def engine_settings(form: str | None, **changes: Any) -> EngineSettings:
    return TIGHT.model_copy(update={"cache_dtype": form, **changes})


def scores(engine: Engine, requests: list[Request]) -> list[list[tuple[int, float]]]:
    """Tokens and their log-probabilities."""
    outputs = [[(e.token, e.logprob) for e in events if e.token is not None] for events in engine.generate(requests)]
    assert engine.scheduler.is_empty, "every page came back"
    return outputs


def prompts(vocab: int, lengths: tuple[int, ...]) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, vocab, n).tolist() for n in lengths]


Change = Callable[[int, str, Any], Any]


@contextmanager
def holding(change: Change) -> Iterator[None]:
    """Programs traced inside have every cached array of a layer replaced by `change(call, name, array)`."""
    calls, meet = 0, attend.meet

    def changed(q: Any, cached: Any, *rest: Any, **options: Any) -> Any:
        nonlocal calls
        cached = {name: change(calls, name, a) for name, a in cached.items()}
        calls += 1
        return meet(q, cached, *rest, **options)

    attend.meet = changed
    try:
        yield
    finally:
        attend.meet = meet


def rounding(module: Any, form: str) -> Change:
    """With the scales that each layer asks for; entries without a scale are left alone."""
    block_counts = {name: n for spec, _ in module.layers.holds().values() for name, n in spec.scales}

    def change(call: int, name: str, a: Any) -> Any:
        blocks = block_counts.get(name, 1)
        return rounded(a, form, blocks, jnp)[1].astype(a.dtype) if blocks else a

    return change


def whole(module: Any, change: Change) -> Callable[[list[int]], np.ndarray]:
    """Logits of a whole sequence, computed at once."""
    graph, weights = split(module)

    @jax.jit
    def full(weights: Any, tokens: Any) -> Any:
        model = merge(graph, weights)
        model.dtype = module.dtype
        with holding(change):
            return model(tokens, Packed((tokens >= 0).astype(jnp.int32)))[0]

    def logits(ids: list[int]) -> np.ndarray:
        padded = np.full((1, LONG), -1, np.int32)
        padded[0, : len(ids)] = ids
        return np.asarray(full(weights, padded))[0, : len(ids)]

    return logits


@pytest.mark.slow
@pytest.mark.parametrize(("family", "example", "form"), STRUCTURES)
def test_the_engine_answers_as_the_whole_sequence_with_rounded_keys_and_values(family: str, example: str, form: str):
    """Though prompts are cut in pieces, several sequences share a step, beginnings are found in the prefix cache, and pages run out."""
    with float64():
        module = module_of(family, example)
        eight, exact = whole(module, rounding(module, form)), whole(module, lambda *a: a[-1])
        token_rows = prompts(module.config.vocab, (5, 43, 6, 17, 9))
        token_rows.append([*token_rows[1][:40], 3, 4, 5])
        engine = Engine(module, engine_settings(form))
        outputs = scores(engine, [Request(p, MOST) for p in token_rows])
        assert engine.scheduler.preemptions
        assert bool(engine.scheduler.pools) == (family in ("gemma", "gpt_oss")), "pools of windows"
        # A page of a window is given away soon when pages are few.
        assert engine.stats.reused_tokens or engine.scheduler.pools or not engine.pages.reuse
        apart = []
        for prompt, answer in zip(token_rows, outputs, strict=True):
            ids = [*prompt, *(token for token, _ in answer)]
            logits, plain = eight(ids)[len(prompt) - 1 : -1], exact(ids)[len(prompt) - 1 : -1]
            assert [token for token, _ in answer] == logits.argmax(-1).tolist()
            chances = [np.log(np.exp(row - row.max()).sum()) + row.max() for row in logits]
            np.testing.assert_allclose(
                [chance for _, chance in answer], logits.max(-1) - np.asarray(chances), rtol=2e-5, atol=2e-6
            )
            apart.append(np.abs(logits - plain).max() / np.abs(plain).max())
        assert max(apart) > 1e-4, "the cache holds the model's type"


# A model that routes to experts, or picks tokens by an indexer, may choose others: then its logits are off by more than to first order.
SMOOTH = [("llama", "plain"), slow("gemma", "3"), slow("deepseek", "2-lite"), slow("qwen3_next", "mixed")]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "example"), SMOOTH)
def test_logits_are_off_by_what_uniform_rounding_makes_of_them(family: str, example: str):
    """To first order, the error of a sum of logits is that of its inputs times its gradient in them. Errors of rounding to the next of
    255 steps are uniform: a step over the root of 12 each, and independent, so the sum's has the root of the sum of squares."""
    with float64():
        module = module_of(family, example)
        graph, weights = split(module)
        ids = jnp.asarray(prompts(module.config.vocab, (LONG,)), jnp.int32)
        round_off, kept_shapes = rounding(module, "int8"), {}

        def summed(offsets: dict[tuple[int, str], Any], *, rounds: bool = False) -> Any:
            def change(call: int, name: str, a: Any) -> Any:
                kept_shapes[call, name] = jax.eval_shape(lambda: a)
                return round_off(call, name, a) if rounds else a + offsets.get((call, name), 0)

            model = merge(graph, weights)
            model.dtype = module.dtype
            with holding(change):
                logits = model(ids, Packed(jnp.ones_like(ids)))[0]
            return (logits * jax.random.rademacher(jax.random.key(0), logits.shape, logits.dtype)).sum()

        exact, eight = jax.jit(lambda: (summed({}), summed({}, rounds=True)))()
        zeros = {at: jnp.zeros(a.shape) for at, a in kept_shapes.items()}

        @jax.jit
        def deviation(zeros: Any) -> Any:
            """Of the sum, if every entry is off by as much as uniform rounding makes it."""
            sizes: dict[tuple[int, str], Any] = {}

            def seen(call: int, name: str, a: Any) -> Any:
                sizes[call, name] = jax.lax.stop_gradient(jnp.abs(a - round_off(call, name, a)))
                return a

            gradient = jax.grad(summed)(zeros)
            model = merge(graph, weights)
            model.dtype = module.dtype
            with holding(seen):
                model(ids, Packed(jnp.ones_like(ids)))
            # The mean square of an entry's error is that over its vector, whose entries share a step.
            squares = [(gradient[at] ** 2 * (sizes[at] ** 2).mean(-1, keepdims=True)).sum() for at in sizes]
            return jnp.sqrt(sum(squares)), jnp.sqrt(sum((s**2).sum() for s in sizes.values()))

        expected, slope = deviation(zeros)
        assert slope > 0
        assert abs(eight - exact) < 4 * expected


@pytest.mark.slow
def test_a_former_owner_and_a_broken_row_reach_nobody_else():
    """Pages hold NaN in values and scales at the start. One row's activations are NaN: it alone has no answer, and whoever gets its
    pages afterwards has the answer of an untouched engine."""
    with float64():
        module = module_of("llama", "plain")
        token_rows = [[token for token in p if token != 7] for p in prompts(module.config.vocab, (9, 30, 17, 24))]
        settings = engine_settings("int8", reuse=False)
        expected = [scores(Engine(module, settings), [Request(p, 9)])[0] for p in token_rows]
        broken = module_of("llama", "plain")
        address = next(a for a in split(broken)[1] if "embed" in a)
        put(broken, {address: split(broken)[1][address].at[7].set(jnp.nan)})
        engine = Engine(broken, settings)
        engine.runner.caches = jax.tree.map(lambda a: jnp.full_like(a, 0xFF if a.dtype == jnp.uint8 else jnp.nan), engine.runner.caches)
        outputs = scores(engine, [Request(p, 9) for p in (token_rows[0], [5, 7, 9, *token_rows[1]], token_rows[1], token_rows[2])])
        assert [outputs[0], outputs[2], outputs[3]] == expected[:3]
        assert all(np.isnan(chance) for _, chance in outputs[1])
        assert scores(engine, [Request(p, 9) for p in token_rows]) == expected


@pytest.mark.slow
def test_layers_in_a_scan_keep_what_separate_layers_keep():
    """Bit for bit in values: a stacked cache is taken apart and put together again."""
    config, layer_caches = FAMILIES["llama"].examples()["plain"], []
    with float64():
        table, zeros = jnp.asarray([[4, 1, 0], [2, 3, -1]], jnp.int32), jnp.zeros(2, jnp.int32)
        t = jnp.broadcast_to(jnp.arange(17, dtype=jnp.int32), (2, 17))
        attending = Paged(table, zeros, zeros, jnp.asarray([17, 9], jnp.int32), t)
        for run in (Unroll(), Scan()):
            model = in_float64(config, run)
            caches = empty_pools(model.layers.holds(), 1, 5, 8, narrow="int8")
            _, caches, _ = forward(model)(tokens_of(config, 2, 17), attending, caches)
            if run.stacked:
                layer_caches.append([jax.tree.map(lambda a, at=at: a[at], caches[name]) for name, at in model.layers.cache_places()])
            else:
                layer_caches.append(list(caches.values()))
        assert len(layer_caches[0]) == 3
        for mine, other in zip(*map(jax.tree.leaves, layer_caches), strict=True):
            assert np.asarray(mine).any()
            np.testing.assert_allclose(mine, other, rtol=1e-6)


SPECULATIVE = [
    slow("llama", "plain", DraftModel(model="itself", tokens=3)),
    slow("qwen3_next", "mixed", NGram(tokens=3, lookup_min=1)),
    slow("deepseek", "3", MTP(tokens=2)),
]


@pytest.mark.parametrize(("family", "example", "method"), SPECULATIVE)
def test_drafts_change_no_answer_and_their_own_cache_is_quantized_too(family: str, example: str, method: Any):
    with float64():
        module = module_of(family, example)
        requests = [Request(p, MOST) for p in prompts(module.config.vocab, (5, 33, 17))]
        plain = scores(Engine(module, engine_settings("int8")), requests)
        engine = Engine(module, engine_settings("int8", speculative=method), draft=module if isinstance(method, DraftModel) else None)
        outputs = scores(engine, requests)
        assert [[token for token, _ in answer] for answer in outputs] == [[token for token, _ in answer] for answer in plain]
        drafter = engine.speculation.drafter
        assert engine.speculation.drafted
        if drafter.caches is not None:
            assert {type(a) for cache in drafter.caches.values() for a in cache.values()} == {Narrow}
            assert drafter.page_bytes * engine.pages.count == bytes_of_caches(drafter.caches)
        if isinstance(method, DraftModel):
            assert sum(engine.speculation.accepted) == engine.speculation.drafted


# ---------------------------------------------------------------- memory and settings


def test_the_same_memory_has_room_for_more_tokens(monkeypatch: pytest.MonkeyPatch):
    """Heads of 64: 64 bytes and a scale of 4 for 256 bytes of float32. The page count and the description follow."""
    specs = {"layer": (Spec(token=(("k", (3, 64)), ("v", (3, 64)))), None)}
    sizes = {form: page_bytes(specs, 16, jnp.float32, form) for form in (None, *FORMS)}
    assert sizes == {None: 16 * 6 * 256, **dict.fromkeys(FORMS, 16 * 6 * 68)}
    # 512 normed features and 64 with positions: nine blocks of 64. An indexer's keys keep their type.
    latent = {"layer": (Spec(token=(("latent", (576,)), ("index", (128,))), scales=(("latent", 9), ("index", 0))), None)}
    assert page_bytes(latent, 1, jnp.bfloat16, "fp8_e4m3") == 576 + 9 * 4 + 2 * 128
    module = random_model(FAMILIES["llama"].examples()["plain"], 0).module
    of_page = {form: page_bytes(module.layers.holds(), 8, module.dtype, form) for form in sizes}
    monkeypatch.setattr(cache, "memory_bytes", lambda: (None, 4 * 30 * of_page[None]))
    for form, size in of_page.items():
        engine = Engine(module, EngineSettings(slots=32, page=8, context=96, cache_dtype=form))
        assert engine.pages.count == 30 * of_page[None] // size
        assert bytes_of_caches(engine.runner.caches) == engine.pages.count * size
        assert engine.runner.describe_cache().endswith(f" in {form}" if form else "B")
    assert of_page[None] > 3 * of_page["int8"]


def test_rings_states_and_the_keys_of_an_indexer_keep_their_type():
    for family, example, narrow, plain in [
        ("deepseek", "3.2", {"latent"}, {"index"}),
        ("qwen3_next", "mixed", {"k", "v"}, {"row.q", "row.k", "row.v", "row.state"}),
    ]:
        specs = FAMILIES[family].examples()[example].build(Unroll()).layers.holds()
        caches = jax.eval_shape(lambda specs=specs: empty_pools(specs, 2, 4, 8, longest=32, slack=32, narrow="int8"))
        kinds = {key: isinstance(a, Narrow) for cache in caches.values() for key, a in cache.items()}
        assert ({k for k, n in kinds.items() if n}, {k for k, n in kinds.items() if not n}) == (narrow, plain)
    spec = Spec(token=(("k", (2, 8)), ("v", (2, 8))), span=5)
    shapes = jax.eval_shape(lambda: empty_pools({"layer": (spec, None)}, 2, 4, 8, longest=32, narrow="int8"))["layer"]
    assert {key: str(a.dtype) for key, a in shapes.items()} == {"ring.k": "float32", "ring.v": "float32"}
    windows = {spec.window: 3}
    shapes = jax.eval_shape(lambda: empty_pools({"layer": (spec, None)}, 2, 4, 8, longest=32, narrow="int8", windows=windows))["layer"]
    assert {key: (a.bits.shape, a.scale.shape) for key, a in shapes.items()} == dict.fromkeys(
        ("window.k", "window.v"), ((3, 8, 2, 8), (3, 8, 2, 1))
    )


def test_heads_and_their_scales_are_on_one_device():
    module = random_model(FAMILIES["llama"].examples()["plain"], 0).module
    where = tensor_shardings(module, 2)
    put(module, {address: jax.device_put(a, where[address]) for address, a in split(module)[1].items()})
    engine = Engine(module, engine_settings("int8"))
    for entry in engine.runner.caches.values():
        for a in entry.values():
            assert a.bits.sharding.shard_shape(a.bits.shape) == (13, 8, 1, 14)
            assert a.scale.sharding.shard_shape(a.scale.shape) == (13, 8, 1, 1)
    share = page_bytes(engine.runner.forward.specs, 8, jnp.float32, "int8", home_mesh(engine.runner.home))
    assert 2 * 13 * share == bytes_of_caches(engine.runner.caches)


@pytest.mark.slow
def test_several_devices_answer_as_one_does_and_compile_nothing_later():
    module = random_model(FAMILIES["llama"].examples()["plain"], 0).module
    requests = [Request(p, 12) for p in prompts(module.config.vocab, (5, 40, 17))]
    alone = [[token for token, _ in answer] for answer in scores(Engine(module, engine_settings("fp8_e4m3")), requests)]
    where = tensor_shardings(module, 2)
    put(module, {address: jax.device_put(a, where[address]) for address, a in split(module)[1].items()})
    engine = Engine(module, engine_settings("fp8_e4m3"))
    number = engine.warm_up()
    size = step_program(engine).compilations
    assert [[token for token, _ in answer] for answer in scores(engine, requests)] == alone
    assert (engine.stats.compilations, step_program(engine).compilations) == (number, size)


def test_what_saves_no_memory_is_refused_before_any_work():
    short = {"layer": (Spec(token=(("k", (2, 4)), ("v", (2, 4)))), None)}
    assert page_bytes(short, 1, jnp.float32, "int8") == 32
    with pytest.raises(BadInput, match="a token takes 32 bytes, and 32 in bfloat16"):
        page_bytes(short, 16, jnp.bfloat16, "int8")
    with pytest.raises(BadInput, match="caches nothing per token"):
        page_bytes({"layer": (Spec(row=(("state", (2, 4)),)), None)}, 16, jnp.float32, "fp8_e5m2")


def test_the_settings_names():
    def read(*words: str) -> EngineSettings:
        return read_settings(EngineSettings, words_layer(list(words))).value

    assert [read(f"cache_dtype={name}").cache_dtype for name in (*FORMS, "fp8", "null")] == [*FORMS, "fp8_e4m3", None]
    assert read().cache_dtype is None
    for wrong in ("cache_dtype=int4", "cache_dtype=bfloat16"):
        with pytest.raises(SettingsError, match="int8"):
            read(wrong)
    with pytest.raises(SettingsError, match="cache_dtype"):
        read("kv_cache_dtype=int8")
