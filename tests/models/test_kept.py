"""Rematerialization that keeps tensors by name: which layers mark which names, the same gradients, and memory between the extremes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relative
from laws.families import CASES, FULLEST

from argosy.core.errors import BadInput, UserError
from argosy.models.parts.attention.attend import Packed
from argosy.models.parts.stack import Scan, Unroll
from argosy.models.parts.stack.addresses import layer_addresses
from argosy.models.parts.stack.remat import NAMES, check_kept
from argosy.models.parts.weight import abstract, fill, merge, split
from argosy.run.assembly.assemble import assemble
from argosy.run.assembly.decided import Decided
from argosy.run.settings.compose import compose
from argosy.run.settings.run import Run
from tools.devices import config_of

B, T = 4, 128
OTHERS = {
    "experts": ("full", "experts"),
    "latent attention": ("full", "qkv"),
    "delta nets": ("dots", "attention"),
    "dense": ("full", "qkv", "attention", "ffn"),
}


def gradient(run: Any, kind: str = "dense") -> tuple[Any, Any]:
    """The compiled gradient of a scalar of a model, and its weights."""
    model = config_of(kind, layers=2 if kind == "experts" else 4).build(run)
    fill(model, jax.random.key(0), addresses=layer_addresses(model))
    graph, weights = split(model)
    tokens = jnp.tile(jnp.arange(T, dtype=jnp.int32) % 32, (B, 1))

    def loss(weights: Any) -> Any:
        out = merge(graph, weights)(tokens, Packed(jnp.ones((B, T), jnp.int32)))
        return (jax.tree.leaves(out)[0].astype(jnp.float32) ** 2).mean()

    return jax.jit(jax.grad(loss)).lower(weights).compile(), weights


def temporaries(program: Any) -> int:
    return program.memory_analysis().temp_size_in_bytes


def marked_names(config: Any) -> set[str]:
    """The names in the program of a model's forward pass, also within loops."""
    model = config.build(Scan())
    graph, _ = split(model)
    segments = jnp.ones((2, 8), jnp.int32)
    text = str(jax.make_jaxpr(lambda leaves: merge(graph, leaves)(segments, config.attend(segments)))(abstract(model)))
    return {name for name in NAMES if f"name[name={name}]" in text}


@pytest.mark.parametrize("name", FULLEST)
def test_layers_mark_the_names_that_their_classes_list(name: str):
    config = CASES[name]
    model, names = config.build(Scan()), marked_names(config)
    assert {"qkv", "attention", "attention_out"} <= names
    assert names & {"ffn", "experts"}
    check_kept(model, sorted(names))
    for missing in set(NAMES) - names:
        with pytest.raises(BadInput, match=f"no layer of this model has {missing}"):
            check_kept(model, [missing])


def test_kept_tensors_change_no_gradient_and_cost_memory():
    (none, weights), (full, _) = gradient(Scan()), gradient(Scan("full"))
    some, _ = gradient(Scan(("full", "attention")))
    assert temporaries(full) < temporaries(some) < temporaries(none)
    # Attention's output: 8 heads of 16, in float32, of 4 layers.
    assert temporaries(some) - temporaries(full) == pytest.approx(4 * B * T * 8 * 16 * 4, rel=0.05)
    expected = none(weights)
    for program in (full, some):
        gradients = program(weights)
        assert max(relative(np.asarray(gradients[a]), np.asarray(expected[a])) for a in expected) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERS)
def test_kept_tensors_change_no_gradient_of_other_layers(kind: str):
    names = OTHERS[kind]
    (none, weights), (least, _), (most, _) = gradient(Scan(), kind), gradient(Scan(names[0]), kind), gradient(Scan(names), kind)
    assert temporaries(least) < temporaries(most) < temporaries(none)
    expected, gradients = none(weights), most(weights)
    assert max(relative(np.asarray(gradients[a]), np.asarray(expected[a])) for a in expected) < 1e-5


@pytest.mark.slow
def test_unrolled_layers_keep_tensors_too():
    none, full, some = (temporaries(gradient(Unroll(kept_names))[0]) for kept_names in ("none", "full", ("full", "ffn")))
    assert full < some < none


def settings(*words: str) -> Run:
    return compose(Run, "tiny", ["data.source=synthetic", "model.layers=2", "eval.batches=0", *words]).value


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["execution.remat=full", "execution.keep=[attention, softmax]"], "qkv.*attention.*attention_out.*ffn.*experts"),
        (["execution.keep=[attention]"], "remat=none keeps everything"),
        (["execution.remat=full", "execution.keep=[ffn, ffn]"], "ffn twice"),
    ],
)
def test_names_that_cannot_be_kept_are_errors(words: list[str], says: str):
    with pytest.raises(UserError, match=says):
        settings(*words)


def test_a_name_that_the_model_lacks_is_an_error():
    run = settings("execution.remat=full", "execution.keep=[attention, experts]")
    with pytest.raises(BadInput, match="no layer of this model has experts"):
        assemble(run, Decided.here(run))
