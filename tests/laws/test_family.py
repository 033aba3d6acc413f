"""The laws of a model family. Every case of `families.CASES` must obey every one.

Two ways to one number are compared in float64, where equal functions agree to 1e-13 on every CPU and a term forgotten does not. In
float32 they differed by up to 2e-5 of the largest logit after recurrent layers, by how much being the processor's choice.
"""

from inspect import signature

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import relative
from laws.families import (
    CASES,
    FULLEST,
    RUNS,
    STRUCTURES,
    each_layout,
    forward,
    in_float64,
    noisy_model,
    parameters_of,
    tokens_of,
)

from argosy.adapt.lora import DoRA, LoRA
from argosy.adapt.quant import int8
from argosy.adapt.surgery import at, swap
from argosy.core.formats import Arrays
from argosy.core.keymap import KeyMap
from argosy.export.lower import lower, raise_again
from argosy.models import FAMILIES
from argosy.models.base.language import LanguageConfig
from argosy.models.parts import stack
from argosy.models.parts.attention.attend import Bidirectional, Contiguous, Paged
from argosy.models.parts.attention.cache import RING, contiguous, empty_pools
from argosy.models.parts.attention.ragged import Ragged, rows_share_pages
from argosy.models.parts.einsum import Contraction
from argosy.models.parts.stack import Scan, Unroll
from argosy.models.parts.stack.addresses import from_layers, layer_addresses, to_layers
from argosy.models.parts.weight import abstract, fill, merge, parameter_count, split, storage_dtype, undrawn, variables
from argosy.observe.flops import contraction_flops
from argosy.ops import attention as ops_attention
from argosy.ops import grouped
from argosy.ops.paged import blocked as paged_blocked

TOLERANCE = 1e-10  # of the largest number, float64

each_case = pytest.mark.parametrize("case", CASES)
# Laws that only trace: by default for three structures. What reads a family's own tables: for the fullest of every family.
each_traced = pytest.mark.parametrize("case", parameters_of(CASES, ["llama", "gemma", "gpt_oss"]))
each_family = pytest.mark.parametrize(
    "case", [pytest.param(name, marks=() if name in FULLEST else pytest.mark.slow) for name in CASES]
)
CAUSAL = [name for name, config in CASES.items() if config.causal]


def whole(case):
    config = CASES[case]
    tokens = tokens_of(config)
    step = forward(in_float64(config, Unroll()))
    return config, tokens, np.asarray(step(tokens, config.attend(jnp.ones_like(tokens)))[0]), step


@pytest.fixture(scope="module")
def known_cases():
    return {}


@pytest.fixture
def full(known_cases):
    """The whole sequence at once, by case, in float64: what everything else is compared with. Types of the package's own accord are
    checked in `test_bfloat16_meets_float32_by_rule`; with float64 enabled JAX's indexes are of two types."""

    def of(case):
        if case not in known_cases:
            known_cases[case] = whole(case)
        return known_cases[case][:3]

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield of


def by_default(law):
    """The examples that a law meets by default, with the layout where it takes one."""
    parametrize = next(mark for mark in law.pytestmark if mark.name == "parametrize")
    return [p.values for p in parametrize.args[1] if not p.marks]


def test_by_default_laws_meet_both_layouts_and_every_structure():
    """Each law one or two of them, since they compile; the longer proofs meet all."""
    laws = {n: law for n, law in globals().items() if n.startswith("test_") and "full" in signature(law).parameters}
    cases_by_law = {name: by_default(law) for name, law in laws.items()}
    assert len(cases_by_law) == 8
    assert {len(some) for some in cases_by_law.values()} == {1, 2}
    layouts = [values[1] for name, law in laws.items() if "run" in signature(law).parameters for values in cases_by_law[name]]
    assert min(layouts.count(run) for run in RUNS) >= 3
    assert {values[0] for some in cases_by_law.values() for values in some} == set(STRUCTURES)
    decoding = {values[0] for name, some in cases_by_law.items() if "decode" in name or "ragged" in name for values in some}
    assert len(decoding) >= 4
    assert decoding >= {"deepseek-3.2", "qwen3_next-mixed"}, "latent attention with experts; recurrent states"


def test_every_family_has_an_example():
    assert {type(c) for c in CASES.values()} == {config for config in FAMILIES.values() if issubclass(config, LanguageConfig)}


@pytest.mark.slow
@each_layout(scan=["llama"], unroll=[])
def test_export_equals_eager(case, run, full):
    """As portable StableHLO, both lengths left open, run on another shape than it was made for."""
    config, tokens, expected = full(case)
    model = in_float64(config, RUNS[run])
    program = raise_again(lower(model))
    got = program(split(model)[1], tokens, jnp.ones_like(tokens))
    assert relative(got, expected) < TOLERANCE


@each_traced
def test_bfloat16_meets_float32_by_rule(case):
    """No type is promoted in silence, in either layout; what is exact stays float32."""
    config = CASES[case]
    for run in RUNS.values():
        model = config.build(run)
        graph, weights = split(model)
        shapes = {a: jax.ShapeDtypeStruct(v.shape, storage_dtype(v, jnp.bfloat16)) for a, v in variables(model).items()}
        assert set(shapes) == set(weights)

        def run_it(weights, tokens, graph=graph):
            model = merge(graph, weights)
            model.dtype = jnp.bfloat16
            return model.hidden(tokens, config.attend(jnp.ones_like(tokens)))[0]

        with jax.numpy_dtype_promotion("strict"):
            assert jax.eval_shape(run_it, shapes, tokens_of(config)).dtype == jnp.bfloat16


@each_case
def test_counts_are_those_of_what_is_built(case):
    config = CASES[case]
    for run in RUNS.values():
        assert parameter_count(abstract(config.build(run))) == config.parameters()


@each_traced
def test_flops_are_those_of_the_trace(case, monkeypatch):
    """Forward, and twice as much backward but for what only a choice follows from. Attention in full and experts by `ragged_dot`:
    what is needed, not what is padded."""
    monkeypatch.setattr(grouped.GROUPED_MATMUL, "prefer", {})
    monkeypatch.setattr(ops_attention.ATTENTION, "prefer", {})
    config = CASES[case]
    graph, params, rest = split(config.build(Scan()), nnx.Param)
    tokens = jax.ShapeDtypeStruct((1, 23), jnp.int32)

    def forward(params, rest, tokens):
        return merge(graph, params, rest)(tokens, Bidirectional(jnp.ones_like(tokens)))[0]

    assert contraction_flops(jax.make_jaxpr(forward)(params, rest, tokens).jaxpr) == config.flops(23)
    both = jax.make_jaxpr(jax.grad(lambda *a: forward(*a).sum()))(params, rest, tokens)
    assert contraction_flops(both.jaxpr) == config.training_flops(23)


@each_family
def test_hub_folder_gives_the_model_again(case):
    """config.json and every tensor, written and read: settings equal, weights bit for bit, each filled once."""
    config = CASES[case]
    model = noisy_model(config, Unroll())
    again = type(config).from_hub(config.to_hub())
    assert again.resolved() == config.resolved()
    table = KeyMap(*config.hub_rows())
    mine = {name: np.asarray(a) for name, a in split(model)[1].items()}
    theirs = Arrays({entry.name: entry.make() for entry in table.inverse(Arrays(mine))})
    assert set(table.plan({name: theirs.shape(name) for name in theirs.names})) == set(mine)
    for name, weight in mine.items():
        np.testing.assert_array_equal(table.read(theirs, name), weight, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("case", parameters_of(CASES, ["llama"]))
def test_scan_equals_unroll_gradients_too(case, full):
    config, tokens, expected = full(case)
    grads = {}
    for name, run in (("unroll", Unroll()), ("scan", Scan("full"))):
        logits, grads[name] = gradients(in_float64(config, run), tokens)
        assert relative(logits, expected) < TOLERANCE, name
    # Without positions that turn, a bias on keys moves all scores of a query alike: its gradient is rounding.
    floor = 1e-4 * max(np.abs(g).max() for g in grads["unroll"].values())
    for address, g in grads["unroll"].items():
        assert np.abs(g).max() > 0 or address.startswith(("pooler.", "mtp.")), f"{address} has no gradient"
        assert np.abs(grads["scan"][address] - g).max() <= 1e-8 * max(np.abs(g).max(), floor), address


def gradients(model, tokens):
    """The logits, and the gradients of the mean cross-entropy by per-layer name."""
    graph, params, rest = split(model, nnx.Param)

    def loss(params):
        logits = merge(graph, params, rest)(tokens, model.config.attend(jnp.ones_like(tokens)))[0]
        return cross_entropy(logits, tokens), logits

    grads, logits = jax.jit(jax.grad(loss, has_aux=True))(params)
    return logits, {name: np.asarray(g) for name, g in to_layers(model, numpy_of(grads)).items()}


def numpy_of(arrays):
    """Arrays that can be sliced without compiling a program for each shape."""
    return {name: np.asarray(a) for name, a in arrays.items()}


def cross_entropy(logits, tokens):
    """Of the tokens that follow. An encoder's vectors stand for logits of as many words as they are wide."""
    following = tokens[:, 1:, None] % logits.shape[-1]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), following, -1))


@each_layout(scan=[], unroll=["gemma"], names=CAUSAL)
def test_contiguous_decode_equals_full(case, run, full):
    """Rows of unequal length: a padded prefill, then one token at a time, each row at its own place."""
    config, tokens, expected = full(case)
    model = in_float64(config, RUNS[run])
    step = forward(model)
    B, T = tokens.shape
    starts = np.asarray([9, 4])
    cache = filled_with(contiguous(model.layers.holds(), B, T + 3, jnp.float64), np.nan)
    at = np.broadcast_to(np.arange(9, dtype=np.int32), (B, 9))
    padded = jnp.asarray(np.where(at < starts[:, None], np.asarray(tokens)[:, :9], 5), jnp.int32)
    logits, cache, _ = step(padded, Contiguous(jnp.asarray(at), jnp.asarray(at < starts[:, None])), cache)
    logits = np.asarray(logits)
    worst = max(relative(logits[b, : starts[b]], expected[b, : starts[b]]) for b in range(B))
    tokens_of_row = [
        (n, np.asarray(a)) for layer, arrays in cache.items() for n, a in arrays.items() if n in per_token(model, layer)
    ]
    for name, a in tokens_of_row:
        row = a[:, 1] if RUNS[run].stacked else a[1]
        padding = range(4, min(9, row.shape[RUNS[run].stacked]))  # a ring may be shorter than the prompt
        assert np.isnan(np.take(row, padding, int(RUNS[run].stacked))).all(), f"padding was written to {name}"
    lengths = starts.copy()
    while (lengths < T).any():
        here = np.minimum(lengths, T - 1)
        new = jnp.asarray(np.asarray(tokens)[np.arange(B), here][:, None])
        live = jnp.asarray(lengths < T)[:, None]
        logits, cache, _ = step(new, Contiguous(jnp.asarray(here, jnp.int32)[:, None], live), cache)
        logits = np.asarray(logits)
        worst = max(worst, *(relative(logits[b, 0], expected[b, here[b]]) for b in range(B) if lengths[b] < T))
        lengths = np.minimum(lengths + 1, T)
    assert worst < TOLERANCE


@each_layout(scan=["llama"], unroll=[], names=CAUSAL)
def test_paged_decode_equals_full(case, run, full, monkeypatch):
    """Shuffled pages, ragged chunks, a padding row, NaN in the pool and any word in dead tokens. What a table or slot names that
    is nobody's is -1, out of range, or somebody else's. Scanned layers find their pages among those of all layers, as on accelerators.
    """
    monkeypatch.setattr(stack, "platform", lambda: "tpu")
    config, tokens, expected = full(case)
    model = in_float64(config, RUNS[run])
    step = forward(model)
    T, page, pages, slots = tokens.shape[1], 4, 40, 5
    order = np.random.default_rng(0).permutation(pages)
    pages_of = order[:22].reshape(2, 11)  # 11 pages hold 41 tokens
    nobody = [pages_of[0, 0], -1, pages, -1, 10**6, pages_of[1, 0]]
    table = jnp.asarray([[*pages_of[0], pages_of[1, 0], -1], [*pages_of[1], -1, pages], [*nobody, *nobody, -1]], jnp.int32)
    slot = jnp.asarray([3, 1, -1], jnp.int32)
    cache = filled_with(empty_pools(model.layers.holds(), slots, pages, page, jnp.float64, longest=T + 3), np.nan)
    done, got = [0, 0], [[], []]
    for chunk in [(5, 9), (9, 3), (1, 1), (0, 4)] + [(1, 1)] * T:
        new = [min(n, T - d) for n, d in zip(chunk, done)]
        width = {9: 9, 4: 4}.get(max(chunk), 1)
        if not any(new):
            break
        padded = np.full((3, width), 5, np.int32)
        for b in range(2):
            padded[b, : new[b]] = np.asarray(tokens)[b, done[b] : done[b] + new[b]]
        t = jnp.asarray(np.broadcast_to(np.arange(width), (3, width)), jnp.int32)
        attend = Paged(table, slot, jnp.asarray([*done, 0], jnp.int32), jnp.asarray([*new, 0], jnp.int32), t)
        logits, cache, _ = step(jnp.asarray(padded), attend, cache)
        for b in range(2):
            got[b].append(np.asarray(logits)[b, : new[b]])
            done[b] += new[b]
    assert done == [T, T]
    assert max(relative(np.concatenate(got[b]), expected[b]) for b in range(2)) < TOLERANCE
    for arrays in cache.values():
        for a in arrays.values():
            pooled = a.shape[int(RUNS[run].stacked)] == pages  # else one entry a slot: rings, states
            untouched = order[22:] if pooled else [n for n in range(slots) if n not in (3, 1)]
            untouched_pages = np.take(np.asarray(a), untouched, int(RUNS[run].stacked))
            assert np.isnan(untouched_pages).all(), "a page or slot of nobody was written"


@pytest.mark.slow
@each_layout(scan=["deepseek"], unroll=["qwen3_next"], names=CAUSAL)
def test_ragged_rows_equal_full(case, run, full, monkeypatch):
    """One sequence decodes while the other's prompt is computed in rows; rows that are nobody's fill both groups. Where all that a
    model caches lies in pages, the rows of a call belong to one sequence. Pages are read three at a time."""
    monkeypatch.setattr(paged_blocked, "BLOCK", 12)
    config, tokens, expected = full(case)
    model = in_float64(config, RUNS[run])
    step, specs = forward(model), model.layers.holds()
    T, page, pages, prompts = tokens.shape[1], 4, 30, (16, 39)
    rows, width = (2, 8) if rows_share_pages(specs, T, slack=T) else (1, 16)
    pages_of = np.random.default_rng(0).permutation(pages)[:22].reshape(2, 11)
    cache = filled_with(empty_pools(specs, 3, pages, page, jnp.float64, longest=T, slack=T), np.nan)

    def group(sequences, lengths, new, width):
        table = [pages_of[b] if b >= 0 else [-1] * 11 for b in sequences]
        slots = [2 - b if b >= 0 else -1 for b in sequences]
        t = np.broadcast_to(np.arange(width), (len(new), width))
        return Paged(*(jnp.asarray(a, jnp.int32) for a in (table, slots, lengths, new, t)))

    done, got, text = [0, 0], [[], []], np.asarray(tokens)
    while min(done) < T:
        filling = next((b for b in range(2) if done[b] < prompts[b]), -1)
        decoding = [b for b in range(2) if prompts[b] <= done[b] < T]
        ones = [*decoding, -1, -1][:2]
        count = min(rows * width, prompts[filling] - done[filling]) if filling >= 0 else 0
        starts = [done[filling] + width * i for i in range(rows)]
        new = [int(np.clip(count - width * i, 0, width)) for i in range(rows)]
        pieces = [filling if n else -1 for n in new]
        flat = [text[b, done[b]] if b >= 0 else 5 for b in ones]
        for b, start, n in zip(pieces, starts, new):
            flat += [*text[b, start : start + n], *[5] * (width - n)]
        lengths = [done[b] if b >= 0 else 0 for b in ones]
        attend = Ragged(
            (
                group(ones, lengths, [int(b >= 0) for b in ones], 1),
                group(pieces, [s if n else 0 for s, n in zip(starts, new)], new, width),
            )
        )
        logits, cache, _ = step(jnp.asarray([flat], jnp.int32), attend, cache)
        logits = np.asarray(logits)
        for i, b in enumerate(decoding):
            got[b].append(logits[0, i : i + 1])
            done[b] += 1
        if count:
            got[filling].append(logits[0, 2 : 2 + count])
            done[filling] += count
    assert max(relative(np.concatenate(got[b]), expected[b]) for b in range(2)) < TOLERANCE


def per_token(model, layer: str) -> set[str]:
    """The arrays of a cache that hold something for each token."""
    names = {name for name, _ in model.layers.holds()[layer][0].token}
    return names | {RING + name for name in names}


def filled_with(cache, value):
    return jax.tree.map(lambda a: jnp.asarray(np.full(a.shape, value, a.dtype)), cache)


@pytest.mark.parametrize("case", parameters_of(CASES, ["gpt_oss"]))
def test_packed_equals_alone(case, full, known_cases):
    config, tokens, _ = full(case)
    step = known_cases[case][3]  # compiled already
    T, cut = tokens.shape[1], 20  # few lengths, since each is compiled
    segments = jnp.asarray(
        [[1] * cut + [2] * cut + [0] * (T - 2 * cut), [4] * 6 + [9] * cut + [0] * (T - 6 - cut)], jnp.int32
    )
    together = step(tokens, config.attend(segments))[0]
    for row, low, high in ((0, 0, cut), (0, cut, 2 * cut), (1, 0, 6), (1, 6, 6 + cut)):
        ones = jnp.ones((1, high - low), jnp.int32)
        alone = np.asarray(step(jnp.asarray(np.asarray(tokens)[row : row + 1, low:high]), config.attend(ones))[0])[0]
        assert relative(np.asarray(together)[row, low:high], alone) < TOLERANCE


@each_traced
def test_layouts_convert_without_a_change(case):
    config = CASES[case]
    unrolled, scanned = noisy_model(config, Unroll()), noisy_model(config, Scan())
    stacked, by_layer = (numpy_of(split(model)[1]) for model in (scanned, unrolled))
    apart = to_layers(scanned, stacked)
    for arrays, expected in ((apart, by_layer), (from_layers(scanned, by_layer), stacked)):
        assert arrays.keys() == expected.keys()
        for address, w in expected.items():
            assert (np.asarray(arrays[address]) == w).all(), address


@each_layout(scan=[], unroll=["llama"])
def test_int8_stays_near(case, run, full):
    config, tokens, expected = full(case)
    model = in_float64(config, RUNS[run])
    size = weight_bytes(model.layers)
    contractions = [path for path in adaptable(model) if "router" not in path]
    assert len(swap(model, r"layers\.(?!.*router).*", int8)) == len(contractions) > 0
    got = np.asarray(forward(model)(tokens, config.attend(jnp.ones_like(tokens)))[0])
    apart = np.linalg.norm(got - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    assert 1e-4 < np.median(apart) < 0.1, "int8 changed nothing, or too much"  # a few tokens may change experts
    assert weight_bytes(model.layers) < 0.5 * size


def adaptable(model) -> list[tuple]:
    """Paths of the contractions in the layers, but for those that only a choice follows from."""
    return [path for path, n in nnx.iter_modules(model.layers) if isinstance(n, Contraction) and not n.chooses]


def weight_bytes(model) -> int:
    return sum(v.get_value().nbytes for v in variables(model).values())


@pytest.mark.slow
@each_layout(scan=["llama"], unroll=[])
def test_adapters_start_at_the_base_train_and_leave_it_untouched(case, run, full):
    """DoRA on attention, LoRA elsewhere, on int8 weights in part."""
    config, tokens, _ = full(case)
    model = in_float64(config, RUNS[run])
    swap(model, r"layers\..*\.(up|down)", int8)
    packed = config.attend(jnp.ones_like(tokens))
    base = np.asarray(forward(model)(tokens, packed)[0])
    frozen = {a: np.asarray(w) for a, w in split(model)[1].items()}
    contractions = adaptable(model)
    dora = swap(model, r"layers\..*\.attn\..*", lambda of: DoRA(of, 3, 6.0))
    swapped = dora + swap(model, r"layers\.(?!.*\.attn\.).*", lambda of: LoRA(of, 3, 6.0))
    assert len(swapped) == len(contractions)
    assert len(fill(model, jax.random.key(1), addresses=layer_addresses(model))) == 2 * len(swapped) + len(dora)
    for name in dora:
        module = at(model, name)
        module.m.set_value(1 / jax.jit(lambda module: module._ratio())(module))
    assert not undrawn(model)
    graph, adapters, rest = split(model, nnx.LoRAParam)

    def loss(adapters):
        logits = merge(graph, adapters, rest)(tokens, packed)[0]
        return cross_entropy(logits, tokens), logits

    @jax.jit
    def descend(adapters):
        (value, logits), grads = jax.value_and_grad(loss, has_aux=True)(adapters)
        step = 0.3 / optax.tree.norm(grads)  # of one length, or a model with steep places leaps
        return value, logits, jax.tree.map(lambda w, g: w - step * g, adapters, grads)

    losses = []
    for turn in range(5):
        value, logits, adapters = descend(adapters)
        losses.append(float(value))
        assert turn or relative(logits, base) < TOLERANCE, "the start is not the base"
    assert losses[-1] < losses[0] - 1e-3
    still = {a.replace(".of.", "."): np.asarray(w) for a, w in rest.items()}
    assert set(still) == set(frozen)
    assert all((still[a] == frozen[a]).all() for a in frozen)
    dead = [a for a, w in adapters.items() if not np.abs(np.asarray(w)).max() > 0]
    assert not dead, "adapters that never moved"
