"""Engines over packed weights: the answers of the plain ones, whoever holds the weights and whatever becomes of them."""

import weakref
from typing import Any

import jax
import numpy as np
import pytest
from test_engine import TIGHT, alone, answers, lm_of, prompts

from argosy.adapt.quant import Scheme, apply_schemes, by_layer, int8
from argosy.adapt.surgery import find, swap
from argosy.infer.cpu import panels
from argosy.infer.engine.engine import Engine
from argosy.infer.engine.request import Request
from argosy.infer.forward.passes import ByLayer
from argosy.models.parts import einsum
from argosy.models.parts.stack import Unroll
from argosy.models.parts.weight import split, variable
from argosy.ops.native import library
from argosy.ops.native.products import Panels, pack_panels
from argosy.weights.build import random_model


@pytest.fixture(autouse=True)
def pack_small_weights_too(monkeypatch: pytest.MonkeyPatch) -> None:
    if why := library.load():
        pytest.skip(f"no kernels here: {why}")
    monkeypatch.setattr(panels, "SMALLEST", 0)


def made_by(engine: Engine) -> dict[str, Any]:
    assert isinstance(engine.runner.forward, ByLayer)
    assert engine.runner.forward.preparation.packer is not None
    return engine.runner.forward.preparation.packer.panels


@pytest.mark.parametrize(
    ("family", "example", "packed", "plain"),
    [
        ("llama", "tied-biased", {"embed.w", "layers.0.attn.q.w", "layers.1.mlp.down.w"}, {"layers.0.mlp.down.b"}),
        pytest.param("llama", "plain", {"head.w"}, {"embed.w"}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", "plain", {"layers.0.attn.o.w"}, {"layers.0.mlp.down.w"}, marks=pytest.mark.slow),
        pytest.param("deepseek", "3", {"layers.0.attn.o.w"}, {"layers.0.attn.k_up.w"}, marks=pytest.mark.slow),
    ],
)
def test_answers_are_those_of_the_plain_weights(family: str, example: str, packed: set[str], plain: set[str]):
    lm = lm_of(family, example)
    engine, some = Engine(lm.module, TIGHT), prompts(lm.config.vocab)
    assert answers(engine, [Request(p, max_tokens=6) for p in some]) == [alone(lm, p, 6) for p in some]
    weights = split(lm.module)[1]
    assert packed <= made_by(engine).keys()
    assert plain <= weights.keys() - made_by(engine).keys()
    assert all(isinstance(a, jax.Array) for a in weights.values()), "they are a copy"


def test_packed_weights_are_tied_to_a_device_only_if_the_weights_were():
    """Programs would compile a second time for the caches that such weights make."""
    lm = lm_of("llama", "plain")
    engine = Engine(lm.module, TIGHT)
    answers(engine, [Request(p, max_tokens=3) for p in prompts(lm.config.vocab, (5, 40))])
    arrays = [*jax.tree.leaves(made_by(engine)), *jax.tree.leaves(engine.runner.caches)]
    assert not any(a.committed for a in arrays)
    tied = jax.device_put(np.ones((64, 64), np.float32), jax.devices()[1])
    assert pack_panels(tied, 1, True).values.devices() == {jax.devices()[1]}


@pytest.mark.slow
def test_int8_weights_are_packed_with_their_scales_beside_them():
    lm = lm_of("llama", "tied-biased")
    swap(lm.module, ".*", int8)
    engine, some = Engine(lm.module, TIGHT), prompts(lm.config.vocab, (5, 40))
    assert answers(engine, [Request(p, max_tokens=6) for p in some]) == [alone(lm, p, 6) for p in some]
    panels_by_name = made_by(engine)
    assert {"embed.values", "layers.0.attn.o.values", "layers.1.mlp.down.values"} <= panels_by_name.keys()
    assert {panels.code.bits for panels in panels_by_name.values()} == {8}
    assert {panels.values.dtype for panels in panels_by_name.values()} == {np.dtype(np.uint8)}


# A rule for each kind of code that has a kernel.
MIXED = {
    "attn.q": Scheme("int8", activations="int8"), "attn.k": Scheme("int4", 8), "attn.v": Scheme("nf4", 8),
    "attn.o": Scheme("mxfp4", 16), "mlp.gate": Scheme("fp8_e4m3"), "mlp.up": Scheme("int2", 4, "minmax"),
    "mlp.down": Scheme("int4", 8, activations="int8"),
}  # fmt: skip


def test_an_engine_multiplies_the_codes_of_every_format():
    lm = lm_of("llama", "tied-biased")
    apply_schemes(lm.module, by_layer(lm.module, {f"layers.{i}.{name}": scheme for i in range(2) for name, scheme in MIXED.items()}))
    engine, some = Engine(lm.module, TIGHT), prompts(lm.config.vocab, (5, 40))
    assert answers(engine, [Request(p, max_tokens=6) for p in some]) == [alone(lm, p, 6) for p in some]
    packed = made_by(engine)
    assert {f"layers.1.{name}.values" for name in MIXED} <= packed.keys()
    bits = {name: packed[f"layers.1.{name}.values"].code.bits for name in MIXED}
    assert bits == {"attn.q": 8, "attn.k": 4, "attn.v": 4, "attn.o": 4, "mlp.gate": 8, "mlp.up": 2, "mlp.down": 4}
    assert packed["embed.w"].scale is None


@pytest.mark.parametrize(
    ("family", "example"),
    [("qwen", "3-experts"), *(pytest.param(*name, marks=pytest.mark.slow) for name in (("gpt_oss", "plain"), ("llama4", "experts")))],
)
def test_an_engine_multiplies_the_codes_of_experts(family: str, example: str, monkeypatch: pytest.MonkeyPatch):
    """With as many rows as routers send to an expert, with biases of experts, and without the product of float experts."""
    lm = lm_of(family, example)
    layers = [name.removesuffix(".router") for name in find(lm.config.build(Unroll()), r"layers\..*\.mlp\.router")]
    rules = {"gate": Scheme("int8", activations="int8"), "up": Scheme("int4", 2), "down": Scheme("nf4", 2)}
    schemes = {f"{layer}.{name}": scheme for layer in layers for name, scheme in rules.items()}
    apply_schemes(lm.module, schemes)
    some = prompts(lm.config.vocab, (5, 40, 17))
    expected = [alone(lm, p, 6) for p in some]
    monkeypatch.setattr(einsum, "grouped_matmul", None)
    engine = Engine(lm.module, TIGHT)
    assert answers(engine, [Request(p, max_tokens=6) for p in some]) == expected
    assert {made_by(engine)[f"{name}.values"].experts for name in schemes} == {lm.config.experts.count}


def test_a_serving_engine_holds_its_weights_once():
    lm = lm_of("llama", "plain")
    some = prompts(lm.config.vocab, (5, 40))
    expected, logits = [alone(lm, p, 6) for p in some], lm.logits([some[0]])
    engine = Engine(lm.module, TIGHT, exclusive=True)
    plain = weakref.ref(variable(lm.module, "layers.0.mlp.gate.w").get_raw_value())
    assert answers(engine, [Request(p, max_tokens=6) for p in some]) == expected
    assert plain() is None
    packed = variable(lm.module, "layers.0.mlp.gate.w").get_raw_value()
    assert packed.values is made_by(engine)["layers.0.mlp.gate.w"].values
    # The module goes on computing, with what packed weights give.
    np.testing.assert_allclose(lm.logits([some[0]]), logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("keeps", [False, True])
def test_new_weights_are_packed_anew(keeps: bool):
    lm, other = lm_of("llama", "plain"), random_model(lm_of("llama", "plain").config, 1)
    engine, some = Engine(lm.module, TIGHT, exclusive=keeps), prompts(lm.config.vocab, (5, 40))
    before = answers(engine, [Request(p, max_tokens=6) for p in some])
    engine.swap_weights(split(other.module)[1])
    after = answers(engine, [Request(p, max_tokens=6) for p in some])
    assert after != before
    assert after == answers(Engine(random_model(lm.config, 1).module, TIGHT), [Request(p, max_tokens=6) for p in some])
    assert isinstance(made_by(engine)["head.w"], Panels)


def test_no_copy_is_made_where_memory_is_short(monkeypatch: pytest.MonkeyPatch):
    lm = lm_of("llama", "plain")
    monkeypatch.setattr(panels, "memory_bytes", lambda: (1 << 20, 4096))
    engine, some = Engine(lm.module, TIGHT), prompts(lm.config.vocab, (5, 40))
    assert answers(engine, [Request(p, max_tokens=3) for p in some]) == [alone(lm, p, 3) for p in some]
    assert not made_by(engine)
