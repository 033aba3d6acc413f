"""A model without vocabulary stands on the seams: a diffusion transformer trains, shards, takes LoRA and exports; a block may carry
several streams."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.dit import DiTConfig, Flow
from flax import nnx
from helpers import relative

from argosy.adapt.lora import LoRA, merge
from argosy.adapt.quant import int8
from argosy.adapt.surgery import swap
from argosy.core.formats import Arrays
from argosy.core.keymap import KeyMap
from argosy.export.lower import lower_program, raise_again
from argosy.models.parts.attention.attend import Bidirectional
from argosy.models.parts.attention.cache import Spec
from argosy.models.parts.einsum import Einsum
from argosy.models.parts.stack import Layer, Scan, Stack, Unroll
from argosy.models.parts.stack.addresses import from_layers, layer_addresses, to_layers
from argosy.models.parts.stack.pipeline import Pipeline
from argosy.models.parts.weight import abstract, fill, logical, put, split
from argosy.models.parts.weight import merge as merge_weights
from argosy.observe.flops import contraction_flops
from argosy.parallel.mesh import MeshSettings
from argosy.parallel.place import batch_sharding
from argosy.parallel.rules import DEFAULT, shardings
from argosy.parallel.scope import scope
from argosy.train.optimizers.adam import AdamW
from argosy.train.schedule import Constant
from argosy.train.state import TrainState, meanings_of, split_trained
from argosy.train.step import make_step

CONFIG = DiTConfig(width=24, layers=6, heads=2, ffn=40, patch=2, classes=3)


def noisy_model(run: Any = None) -> Any:
    """The model with noise on every weight, the same in any layout."""
    model = CONFIG.build(run or Unroll())
    fill(model, jax.random.key(3), addresses=layer_addresses(model))
    noise = np.random.default_rng(5)
    like = CONFIG.build(Unroll())
    shapes = {name: a.shape for name, a in abstract(like).items()}
    by_layer = {name: noise.normal(0, 0.2, shapes[name]).astype(np.float32) for name in sorted(shapes)}
    put(model, {a: jnp.asarray(w) for a, w in from_layers(model, by_layer).items()})
    return model


def batch_of(rows: int = 8) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 3, rows)
    images = (np.arange(36).reshape(6, 6) % (2 + labels[:, None, None]) == 0).astype(np.float32)
    return {"images": jnp.asarray(images), "labels": jnp.asarray(labels, jnp.int32)}


def velocity(model: Any, rows: int = 8) -> Any:
    batch = batch_of(rows)
    return model(batch["images"], jnp.linspace(0.1, 0.9, rows), batch["labels"])


def test_parameters_and_flops_are_those_of_what_is_built():
    model = noisy_model()
    assert CONFIG.parameters() == sum(a.size for a in split(model)[1].values())
    tokens, rows = 9, 8
    traced = contraction_flops(jax.make_jaxpr(lambda: velocity(model))().jaxpr)
    # Modulation and time step are computed once for an image, not for each patch; labels are looked up.
    flops_once = CONFIG.layers * 6 * CONFIG.width**2 + CONFIG.waves * CONFIG.width
    counted = CONFIG.flops(tokens) - 2 * (tokens - 1) * flops_once
    assert traced == rows * counted


def test_layers_run_alike_and_the_condition_reaches_each():
    with jax.enable_x64():
        plain = noisy_model()
        plain.dtype = jnp.float64
        whole = velocity(plain)
        scanned = noisy_model(Scan())
        scanned.dtype = jnp.float64
        assert relative(velocity(scanned), whole) < 1e-6
        graph, leaves = split(plain)
        for layer in range(CONFIG.layers):
            name = f"layers.{layer}.modulation.w"
            assert relative(velocity(merge_weights(graph, leaves | {name: 0 * leaves[name]})), whole) > 1e-4, layer


def test_it_stands_on_a_pipeline_with_its_condition():
    mesh = MeshSettings(stage=2, data=4).build(jax.devices())
    piped, plain = noisy_model(Pipeline(2, 2)), noisy_model(Scan())
    with scope(mesh):
        staged = jax.jit(lambda: velocity(piped))()
    assert relative(staged, velocity(plain)) < 1e-5


def train_steps(model: Any, steps: int, mesh: Any = None) -> tuple[Any, list[float]]:
    graph, params, rest = split_trained(model)
    rate = Constant(warmup=0).build(steps)
    transform = AdamW(learning_rate=3e-3).build(rate, meanings_of(model))
    state = TrainState.start(params, rest, transform.init(params), 0)
    step, batch, losses = make_step(graph, Flow(), transform, rate), batch_of(), []
    if mesh is not None:
        places = shardings(logical(model), {a: w.shape for a, w in (params | rest).items()}, DEFAULT, mesh)
        assert any(not place.is_fully_replicated for place in places.values())
        params = {a: jax.device_put(w, places[a]) for a, w in params.items()}
        state = TrainState.start(params, rest, transform.init(params), 0)
        batch = {name: jax.device_put(a, batch_sharding(mesh)) for name, a in batch.items()}
    update = jax.jit(step)
    for _ in range(steps):
        with scope(mesh) if mesh is not None else jax.default_matmul_precision("float32"):
            state, metrics = update(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


def test_it_trains():
    losses = train_steps(CONFIG_TRAINED := noisy_model(), 60)[1]
    assert CONFIG_TRAINED.config is CONFIG
    assert np.mean(losses[-10:]) < 0.5 * np.mean(losses[:3])


def test_sharded_equals_unsharded():
    plain, losses = train_steps(noisy_model(Scan()), 3)
    mesh = MeshSettings(fsdp=4, tensor=2).build(jax.devices())
    sharded, same = train_steps(noisy_model(Scan()), 3, mesh)
    assert same == pytest.approx(losses, rel=1e-5)
    assert all(relative(sharded.params[a], w) < 2e-2 for a, w in plain.params.items())  # Adam's first step is a sign


def test_lora_starts_at_the_base_and_trains_alone():
    base = velocity(noisy_model())
    model = noisy_model()
    matched = swap(model, r"layers\.\d+\.(attn\.[qkvo]|mlp\..*|modulation)|patch", lambda of: LoRA(of, 2, 4.0))
    assert len(matched) == 6 * 7 + 1
    fill(model, jax.random.key(0), addresses=layer_addresses(model))
    assert relative(velocity(model), base) < 1e-6
    before = to_layers(model, split(model)[1])
    state, losses = train_steps(model, 30)
    assert np.mean(losses[-5:]) < np.mean(losses[:3])
    after = before | to_layers(model, {**state.params, **state.rest})
    frozen = [a for a in before if a.endswith(".of.w")]
    assert len(frozen) == len(matched)
    assert all((np.asarray(after[a]) == np.asarray(before[a])).all() for a in frozen)
    put(model, {**state.params, **state.rest})
    whole = velocity(model)
    merge(model)
    assert relative(velocity(model), whole) < 1e-5


def test_int8_stays_near():
    model = noisy_model()
    whole = velocity(model)
    swap(model, ".*", int8)
    assert 0 < relative(velocity(model), whole) < 0.1


def test_it_exports():
    model, batch = noisy_model(), batch_of(2)
    time = jnp.asarray([0.2, 0.7])
    program = lower_program(model, lambda m, *args: m(*args), (batch["images"], time, batch["labels"]), platforms=("cpu",))
    leaves = split(model)[1]
    assert relative(raise_again(program)(leaves, batch["images"], time, batch["labels"]), velocity_at(model, batch, time)) < 1e-6


def velocity_at(model: Any, batch: dict[str, Any], time: Any) -> Any:
    return model(batch["images"], time, batch["labels"])


def test_names_on_the_hub_go_both_ways():
    leaves = to_layers(model := noisy_model(), split(model)[1])
    table = KeyMap(*CONFIG.hub_rows())
    theirs = Arrays({entry.name: entry.make() for entry in table.inverse(Arrays({a: np.asarray(w) for a, w in leaves.items()}))})
    assert set(table.plan({name: theirs.shape(name) for name in theirs.names})) == set(leaves)
    assert all((table.read(theirs, a) == np.asarray(w)).all() for a, w in leaves.items())


class TwoStreams(nnx.Module):
    """Image and text attend to each other: one attention over both, weights apart (Esser et al. 2024, arXiv:2403.03206)."""

    def __init__(self, width: int):
        d = {"D": width, "N": 2, "H": width // 2}
        self.image = Einsum("BTD,DNH->BTNH", d)
        self.text = Einsum("BTD,DNH->BTNH", d)
        self.back = Einsum("BTNH,NHD->BTD", d)

    def holds(self, each: Any) -> Spec:
        return Spec()

    def __call__(self, x: Any, each: Any, cache: Any, attend: Any, condition: Any) -> Any:
        heads = jnp.concatenate([self.image(x["image"]), self.text(x["text"])], 1)
        y = self.back(jax.nn.softmax(heads, 1) * condition[:, None, None, None])
        n = x["image"].shape[1]
        return {"image": x["image"] + y[:, :n], "text": x["text"] + y[:, n:]}, cache, {}


@pytest.mark.parametrize("run", [Scan(), Scan("full"), Pipeline(2, 2), Pipeline(2, 2, rounds=2)], ids=str)
def test_a_block_may_carry_several_streams(run):
    def of(run: Any) -> Any:
        stack = Stack([Layer("block")] * 4, lambda kind: TwoStreams(6), run=run)
        fill(stack, jax.random.key(0), addresses=layer_addresses(stack))
        return stack

    rng = np.random.default_rng(0)
    x = {name: jnp.asarray(rng.normal(size=(8, n, 6)), jnp.float32) for name, n in (("image", 5), ("text", 3))}
    condition = jnp.asarray(rng.normal(size=8), jnp.float32)
    attend = Bidirectional(jnp.ones((8, 1), jnp.int32))
    plain, other = of(Unroll()), of(run)

    def summed(stack: Any, x: Any) -> Any:
        y, _, _ = stack(x, None, attend, condition)
        return sum(jnp.sum(a * a) for a in y.values()), y

    (_, want), gradient = jax.value_and_grad(lambda x: summed(plain, x), has_aux=True)(x)
    with scope(MeshSettings(stage=2, data=4).build(jax.devices())):
        (_, got), same = jax.jit(jax.value_and_grad(lambda x: summed(other, x), has_aux=True))(x)
    for name in x:
        assert relative(got[name], want[name]) < 1e-5
        assert relative(same[name], gradient[name]) < 1e-5
