"""Laws of every registered denoiser: layers run alike, counts and names fit what is built, meshes, adapters, int8 and export."""

from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import relative

from argosy.adapt.lora import LoRA, merge
from argosy.adapt.quant import int8
from argosy.adapt.surgery import swap
from argosy.core.formats import Arrays
from argosy.core.keymap import KeyMap
from argosy.export.lower import lower_program, raise_again
from argosy.models import FAMILIES
from argosy.models.diffusion.base import Conditions, DenoiserConfig
from argosy.models.parts.stack import Scan, Unroll
from argosy.models.parts.stack.addresses import from_layers, layer_addresses, to_layers
from argosy.models.parts.weight import abstract, fill, logical, parameter_count, put, split, variables
from argosy.models.parts.weight import merge as merge_weights
from argosy.observe.flops import contraction_flops
from argosy.parallel.mesh import MeshSettings
from argosy.parallel.place import batch_sharding
from argosy.parallel.rules import DEFAULT, shardings
from argosy.parallel.scope import scope

CASES = {
    f"{family}-{name}": config
    for family, kind in FAMILIES.items()
    if issubclass(kind, DenoiserConfig)
    for name, config in kind.examples().items()
}
each = pytest.mark.parametrize("config", CASES.values(), ids=CASES)


def inputs_of(config: Any, rows: int = 2, multiples: tuple[int, int] = (3, 2)) -> tuple[Any, Any, Conditions]:
    """Noisy images that are not square, time steps and all conditions that the model reads."""
    rng = np.random.default_rng(1)
    size = [n * config.size_multiple for n in multiples]
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    makers = {
        "labels": lambda: jnp.asarray(rng.integers(0, config.classes_known + 1, rows), jnp.int32),
        "text": lambda: normal(rows, 5, config.text_width),
        "text_mask": lambda: jnp.asarray(np.arange(5) < rng.integers(2, 6, (rows, 1)), jnp.int32),
        "pooled": lambda: normal(rows, config.pooled_width),
        "guidance": lambda: jnp.linspace(1.0, 5.0, rows),
        "interval": lambda: jnp.linspace(10.0, 400.0, rows),
    }
    conditions = Conditions(**{name: makers[name]() for name in config.conditions})
    return normal(rows, *size, config.channels), jnp.linspace(20.0, 900.0, rows), conditions


def noisy_denoiser(config: Any, run: Any = None, scale: float = 0.2) -> Any:
    """The model with noise on every weight, the same in any layout."""
    model = config.build(run or Unroll())
    fill(model, jax.random.key(3), addresses=layer_addresses(model))
    noise = np.random.default_rng(5)
    shapes = {name: a.shape for name, a in abstract(config.build(Unroll())).items()}
    by_layer = {name: noise.normal(0, scale, shapes[name]).astype(np.float32) for name in sorted(shapes)}
    put(model, {a: jax.device_put(w) for a, w in from_layers(model, by_layer).items()})
    return model


def positions_of(config: Any, latents: Any) -> int:
    return (latents.shape[1] // config.size_multiple) * (latents.shape[2] // config.size_multiple)


@each
def test_counts_and_names_are_those_of_what_is_built(config):
    model = noisy_denoiser(config)
    assert parameter_count(abstract(model)) == config.parameters()
    table = KeyMap(*config.hub_rows())
    assert set(table.paths) == set(variables(model))
    latents, *rest = inputs_of(config)
    traced = contraction_flops(jax.make_jaxpr(lambda x: model(x, *rest))(latents).jaxpr)
    assert traced == len(latents) * config.flops(positions_of(config, latents))


@each
def test_the_output_has_the_shape_of_the_input_and_reads_everything(config):
    model, (latents, timestep, conditions) = noisy_denoiser(config), inputs_of(config)
    whole = model(latents, timestep, conditions)
    assert whole.shape == latents.shape
    assert whole.dtype == jnp.float32
    assert relative(model(latents, timestep + 30, conditions), whole) > 1e-4
    for name in config.conditions - {"text_mask"}:
        value = getattr(conditions, name)
        other = (value + 1) % (config.classes_known + 1) if name == "labels" else value * 0.5 + 0.1
        assert relative(model(latents, timestep, conditions._replace(**{name: other})), whole) > 1e-5, name


@each
def test_scan_equals_unroll_and_every_weight_matters(config):
    with jax.enable_x64():
        inputs = inputs_of(config)
        plain, scanned = noisy_denoiser(config), noisy_denoiser(config, Scan())
        plain.dtype = scanned.dtype = jnp.float64
        whole = plain(*inputs)
        assert relative(scanned(*inputs), whole) < 1e-6
        graph, leaves = split(plain)
        grad = jax.grad(lambda leaves: jnp.sum(merge_weights(graph, leaves)(*inputs) ** 2))(leaves)
        # A bias of keys shifts all scores of a query alike, which a softmax does not see.
        silent = {a for a, g in grad.items() if not np.abs(g).max() > 1e-9 and not a.endswith("attn.k.b")}
        assert silent == {a for a in grad if any(fnmatchcase(a, pattern) for pattern in config.idle_weights)}
        graph, stacked = split(scanned)
        other = jax.grad(lambda leaves: jnp.sum(merge_weights(graph, leaves)(*inputs) ** 2))(stacked)
        other = to_layers(scanned, other)
        assert all(relative(other[a], g) < 1e-5 for a, g in grad.items() if a not in silent and not a.endswith("attn.k.b"))


@each
def test_images_of_a_batch_do_not_see_each_other(config):
    with jax.enable_x64():
        model, (latents, timestep, conditions) = noisy_denoiser(config), inputs_of(config)
        model.dtype = jnp.float64
        whole = model(latents, timestep, conditions)
        alone = model(latents[1:], timestep[1:], jax.tree.map(lambda a: a[1:], conditions))
        assert relative(alone, whole[1:]) < 1e-10


@each
def test_sharded_equals_unsharded(config):
    model, inputs = noisy_denoiser(config, Scan()), inputs_of(config, rows=8)
    whole = model(*inputs)
    mesh = MeshSettings(fsdp=4, tensor=2).build(jax.devices())
    graph, leaves = split(model)
    places = shardings(logical(model), {a: w.shape for a, w in leaves.items()}, DEFAULT, mesh)
    assert any(not place.is_fully_replicated for place in places.values())
    placed = {a: jax.device_put(w, places[a]) for a, w in leaves.items()}
    rows = jax.tree.map(lambda a: jax.device_put(a, batch_sharding(mesh)), inputs)
    with scope(mesh):
        result = jax.jit(lambda leaves, inputs: merge_weights(graph, leaves)(*inputs))(placed, rows)
    assert relative(result, whole) < 1e-5


@each
def test_adapters_start_at_the_base_and_merge_into_it(config):
    model, inputs = noisy_denoiser(config), inputs_of(config)
    base = model(*inputs)
    where = r"layers\.\d+\..*" if hasattr(model, "layers") else r".*\.attn[12]\..*"
    matched = swap(model, where, lambda of: LoRA(of, 2, 4.0))
    assert len(matched) >= 3 * config.layers
    fill(model, jax.random.key(0), addresses=layer_addresses(model))
    assert relative(model(*inputs), base) < 1e-6
    rng = np.random.default_rng(2)
    factors = {a: v for a, v in variables(model).items() if isinstance(v, nnx.LoRAParam)}
    noise = {a: jnp.asarray(rng.normal(0, 0.1, v.shape), jnp.float32) for a, v in factors.items()}
    put(model, noise)
    whole = model(*inputs)
    assert relative(whole, base) > 1e-3
    merge(model)
    assert relative(model(*inputs), whole) < 1e-5


@each
def test_int8_stays_near(config):
    model, inputs = noisy_denoiser(config), inputs_of(config)
    whole = model(*inputs)
    swap(model, ".*", int8)
    assert 0 < relative(model(*inputs), whole) < 0.1


@each
def test_it_exports(config):
    model, inputs = noisy_denoiser(config), inputs_of(config)
    latents, timestep, conditions = inputs
    fields = {name: value for name, value in conditions._asdict().items() if value is not None}
    arguments = (latents, timestep, fields)
    program = lower_program(model, lambda m, x, t, traced: m(x, t, Conditions(**traced)), arguments, platforms=("cpu",))
    assert relative(raise_again(program)(split(model)[1], *arguments), model(*inputs)) < 1e-6


@each
def test_names_on_the_hub_go_both_ways(config):
    leaves = to_layers(model := noisy_denoiser(config), split(model)[1])
    table = KeyMap(*config.hub_rows())
    theirs = Arrays({entry.name: entry.make() for entry in table.inverse(Arrays({a: np.asarray(w) for a, w in leaves.items()}))})
    assert set(table.plan({name: theirs.shape(name) for name in theirs.names})) == set(leaves)
    assert all((table.read(theirs, a) == np.asarray(w)).all() for a, w in leaves.items())
