"""Memory and work of compiled programs, and numbers that a type must not change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import default, relative
from laws.families import CASES, FULLEST, RUNS, noisy_model, parameters_of, tokens_of

from argosy.models.gemma import GemmaConfig
from argosy.models.mixtral import MixtralConfig
from argosy.models.parts.attention.attend import Contiguous, Packed, Paged
from argosy.models.parts.attention.cache import bytes_of_caches, contiguous, empty_pools
from argosy.models.parts.stack import Scan, Unroll
from argosy.models.parts.weight import abstract, merge, split
from argosy.models.settings import Experts
from argosy.observe.flops import contraction_flops
from argosy.ops.narrow import FORMS
from argosy.train.objectives.next_token import NextToken
from argosy.train.objectives.tokens import losses as losses_of
from argosy.train.state import split_trained
from tools.devices import COMMON, EXPERTS

ROWS, LENGTH = 4, 512
DEEP = GemmaConfig(
    vocab=64, width=32, layers=8, ffn=64, heads=4, kv_heads=4, head_size=16, context=2048, window=64, pattern="LLG"
)


def strategies():
    ones = jnp.ones((ROWS, 1), jnp.int32)
    table = jnp.zeros((ROWS, LENGTH // 16), jnp.int32)
    return {
        "contiguous": Contiguous(ones, ones > 0),
        "paged": Paged(table, ones[:, 0], ones[:, 0], ones[:, 0], ones),
    }


@pytest.mark.parametrize(
    ("kind", "run"),
    default(("paged", "scan"), of=[(kind, run) for kind in ("contiguous", "paged", *FORMS) for run in RUNS]),
)
def test_a_decode_step_needs_little_beside_its_cache(kind, run):
    """Caches that went through a scan as inputs and outputs took 459 MB of temporaries for 268 MB; quantized ones are widened
    a block at a time."""
    model = DEEP.build(RUNS[run])
    graph, _ = split(model)
    specs = model.layers.holds()
    narrow = kind if kind in FORMS else None
    pages = {"longest": LENGTH, "slack": LENGTH if narrow else 0, "narrow": narrow}
    cache = jax.eval_shape(
        lambda: contiguous(specs, ROWS, LENGTH) if kind == "contiguous" else empty_pools(specs, ROWS, ROWS * LENGTH // 16, 16, **pages)
    )

    attend = strategies()["paged" if narrow else kind]

    def step(weights, tokens, cache):
        return merge(graph, weights)(tokens, attend, cache)[:2]

    tokens = jnp.zeros((ROWS, 1), jnp.int32)
    program = jax.jit(step, donate_argnums=2).lower(abstract(model), tokens, cache).compile()
    assert program.memory_analysis().temp_size_in_bytes < 1.2 * bytes_of_caches(cache)


@pytest.mark.parametrize("pattern", ["G", "LG"])
def test_scanned_layers_copy_one_repeat_of_their_weights_at_a_time(pattern):
    """With an axis of one between layers and matrix, XLA:CPU copied the weights of all layers in every step."""
    config = DEEP.model_copy(update={"width": 128, "ffn": 1024, "layers": 16, "pattern": pattern})
    model = config.build(Scan())
    graph, _ = split(model)
    cache = jax.eval_shape(lambda: contiguous(model.layers.holds(), 1, 64))
    ones = jnp.ones((1, 1), jnp.int32)

    def step(weights, cache):
        return merge(graph, weights)(ones, Contiguous(ones, ones > 0), cache)[:2]

    program = jax.jit(step, donate_argnums=1).lower(abstract(model), cache).compile()
    weights = sum(s.size * s.dtype.itemsize for a, s in abstract(model).items() if a.startswith("layers."))
    assert program.memory_analysis().temp_size_in_bytes < 0.25 * weights


def test_layers_that_the_plan_has_left_over_are_not_copied():
    """Gemma 3 1B: four groups of six layers, and two. A slice of an array of all would copy the weights in every step."""
    model = DEEP.model_copy(update={"width": 128, "ffn": 1024, "layers": 14}).build(Scan())
    assert [(g.start, len(g.layers), g.repeats) for g in model.layers.groups] == [(0, 3, 4), (12, 1, 2)]
    graph, _ = split(model)
    tokens = jnp.zeros((1, 4), jnp.int32)
    program = jax.jit(lambda w, t: merge(graph, w)(t, Packed(jnp.ones_like(t)))[0]).lower(abstract(model), tokens).compile()
    weights = sum(s.size * s.dtype.itemsize for a, s in abstract(model).items() if a.startswith("layers."))
    assert program.memory_analysis().temp_size_in_bytes < 0.5 * weights


@pytest.mark.slow
def test_rematerialization_of_all_but_products_recomputes_no_product():
    """Of experts neither."""
    experts = Experts(**EXPERTS)
    config = MixtralConfig(**COMMON, ffn=64, heads=8, kv_heads=4, head_size=16, moe=experts)
    tokens = jax.ShapeDtypeStruct((2, 32), jnp.int32)

    def flops(remat):
        graph, params, rest = split_trained(config.build(Unroll(remat)))

        def loss(params, rest, tokens):
            return jnp.sum(merge(graph, params, rest)(tokens, Packed(jnp.ones_like(tokens)))[0])

        return contraction_flops(jax.make_jaxpr(jax.grad(loss))(params, rest, tokens).jaxpr)

    attention = 2 * config.mixing_flops(32)
    assert 0 <= flops("dots") - flops("none") <= attention
    assert flops("full") - flops("none") > attention + 2 * 64 * config.layers * 3 * experts.active * experts.ffn * config.width


@pytest.mark.parametrize("case", parameters_of((n for n, c in CASES.items() if c.causal), ["llama"]))
def test_bfloat16_losses_agree_between_all_heads(case):
    """Logits leave the head in float32: rounded to bfloat16, 3 % of tokens tie and losses differ by a tenth of a nat."""
    config = CASES[case]
    model = noisy_model(config, Unroll())
    model.dtype = jnp.bfloat16
    tokens = tokens_of(config, length=12)
    graph, weights = split(model)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segments": jnp.ones_like(tokens[:, 1:])}
    batch["mask"] = jnp.ones(batch["targets"].shape)

    @jax.jit
    def losses(weights):
        model = merge(graph, weights)
        model.dtype = jnp.bfloat16
        x, _, _ = model.hidden(batch["tokens"], Packed(batch["segments"]))
        return {h: losses_of(NextToken(head=h, chunk=5), model, x, batch["targets"])[0] for h in ("logits", "blocks", "chunks")}

    losses_by_head = {head: np.asarray(nll) for head, nll in losses(weights).items()}
    assert all(nll.dtype == np.float32 for nll in losses_by_head.values())
    for head in ("blocks", "chunks"):
        assert np.abs(losses_by_head[head] - losses_by_head["logits"]).max() < 1e-4, head


def test_logits_of_bfloat16_activations_do_not_tie():
    config = CASES["llama-plain"]
    model = noisy_model(config, Unroll())
    x = jax.random.normal(jax.random.key(0), (4, 64, config.width), jnp.bfloat16)
    logits = np.sort(np.asarray(model.unembed(x)), -1)
    assert (logits[..., -1] > logits[..., -2]).all()
    assert relative(logits.astype(jnp.bfloat16), logits) > 1e-4, "they were rounded"


def test_the_fullest_examples_are_among_the_cases():
    assert set(FULLEST) <= set(CASES)
