"""What devices share: each one's work, memory and traffic as their number grows, and the same numbers whatever it is."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import default, described_tpus, relative
from laws.families import noisy_model

from argosy.models import FAMILIES
from argosy.models.parts.stack import Scan, Unroll
from argosy.models.parts.stack.addresses import to_layers
from argosy.models.parts.stack.pipeline import Pipeline
from argosy.models.parts.weight import abstract, logical, merge, split
from argosy.observe.hlo import cost
from argosy.observe.hlo.collectives import collectives
from argosy.observe.hlo.module import HloModule
from argosy.parallel.gather import GatherOnce
from argosy.parallel.mesh import MeshSettings
from argosy.parallel.place import batch_sharding, like_weights
from argosy.parallel.rules import shardings
from argosy.parallel.scope import activation_spec, constrain, platform, scope
from argosy.train.objectives.next_token import NextToken
from argosy.train.optimizers.sgd import SGD
from argosy.train.schedule import Constant
from argosy.train.state import TrainState, meanings_of, split_trained, training_graph
from argosy.train.step import make_step
from tools.devices import (
    COMMON,
    EXPERTS,
    LENGTH,
    MESHES,
    MICROBATCHES,
    MODELS,
    ROWS,
    STAGED,
    config_of,
    lowered_step,
    staged_cost,
    step_cost,
)  # fmt: skip

KINDS = default("dense", of=MODELS)


@pytest.mark.parametrize("name", KINDS)
def test_each_device_does_less_as_devices_grow(name):
    """Experts' rows were once sorted and gathered by every device: 1.33e10 FLOPs on one, 1.30e10 on each of eight."""
    config = config_of(name)
    single, two, eight = (step_cost(config, MESHES[mesh]) for mesh in ("1", "fsdp 2", "fsdp 8"))
    # Products of experts run in loops, of which XLA counts the body once, so their share does not fall in its figure.
    assert single.flops > 1.7 * two.flops
    assert single.flops > (7 if name == "dense" else 5) * eight.flops
    assert single.temporary_bytes > 1.6 * two.temporary_bytes
    assert two.temporary_bytes > 2.5 * eight.temporary_bytes
    assert single.collective_bytes == 0
    # Weights are gathered whole however many devices hold them; nothing else may grow with the devices.
    assert eight.collective_bytes <= two.collective_bytes


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) for n in ("dense", "experts")])
def test_a_tensor_axis_splits_the_work(name):
    config = config_of(name)
    rows, split = (step_cost(config, MESHES[mesh]) for mesh in ("fsdp 2", "fsdp 2, tensor 4"))
    assert rows.flops > 3 * split.flops
    assert rows.temporary_bytes > 2 * split.temporary_bytes


def update_on(config, run, sizes, accumulate=1, dtype=jnp.int32, head="logits", rules=(), precision="float32", gather="each"):
    """Loss and weights after a step on so many devices."""
    model = noisy_model(config, run)
    _, params, rest = split_trained(model)
    if precision != "float32":
        params, rest = ({a: w.astype(precision) for a, w in part.items()} for part in (params, rest))
    rate = Constant(warmup=0).build(10)
    optimizer = SGD(learning_rate=0.1).build(rate, meanings_of(model))
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, config.vocab, (8, 25))
    segments = np.asarray([[1] * (7 + row) + [2] * (13 - row) + [0] * 4 for row in range(8)])
    batch = {
        "tokens": jnp.asarray(tokens[:, :-1], dtype),
        "targets": jnp.asarray(tokens[:, 1:], dtype),
        "segments": jnp.asarray(segments, dtype),
        "mask": jnp.asarray((segments > 0) * rng.random(segments.shape), jnp.float32),
    }
    state = TrainState.start(params, rest, optimizer.init(params), 0)
    options = {"accumulate": accumulate, "precision": precision}
    step = partial(make_step, training_graph(model), NextToken(head=head, chunk=16), optimizer, rate, **options)
    if sizes is None:
        after, metrics = jax.jit(step())(state, batch)
    else:
        settings = MeshSettings(**sizes, rules=list(rules))
        mesh = settings.build(jax.devices()[: math.prod(sizes.values())])
        shapes = abstract(model)
        weights = shardings(logical(model), {a: s.shape for a, s in shapes.items()}, settings.table(), mesh)
        places = like_weights(state, weights, shapes, mesh)
        with scope(mesh, settings.table()):
            after, metrics = jax.jit(step(gather=GatherOnce(weights) if gather == "once" else None), out_shardings=(places, None))(
                jax.device_put(state, places), jax.device_put(batch, batch_sharding(mesh))
            )
    return {n: float(m) for n, m in metrics.items()}, {a: np.asarray(w) for a, w in (after.params | after.rest).items()}


def same(single, other, metrics=("loss", "grad_norm"), near=1e-5):
    for name in metrics:
        assert other[0][name] == pytest.approx(single[0][name], rel=near), name
    for address, w in single[1].items():
        assert relative(other[1][address], w) < 10 * near, address


GRID = {"data": 2, "fsdp": 2, "tensor": 2}
CHANGES = {
    "dense": ("dense", {}),
    "experts": ("experts", {"balance": 0.1, "z_loss": 0.1}),
    "a capacity": ("experts", {"capacity": 0.7, "balance": 0.1, "balance_over": "batch"}),
    "latent attention": ("latent attention", {"bias": True, "balance": 0.1}),
    "delta nets": ("delta nets", {}),
}


def changed_config(name, **sizes):
    kind, moe = CHANGES[name]
    config = config_of(kind, **sizes)
    return config.model_copy(update={"moe": config.moe.model_copy(update=moe)}) if moe else config


@pytest.mark.parametrize(
    ("name", "run"),
    [
        pytest.param(n, r, id=f"{n}-{type(r).__name__}", marks=() if (n, type(r)) in DEFAULTS else pytest.mark.slow)
        for DEFAULTS in [{("dense", Unroll)}]
        for n in CHANGES
        for r in (Unroll(), Scan())
    ],
)
def test_a_mesh_changes_no_number(name, run):
    config = changed_config(name)
    metrics = ("loss", "grad_norm", *(("experts_dropped",) if name == "a capacity" else ()))
    same(update_on(config, run, None), update_on(config, run, GRID), metrics)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["experts", "dense"])
def test_rotations_of_split_features_change_no_number(name):
    """A rotation needs all features of a token, and all of its heads, which a tensor axis splits."""
    config = changed_config(name).model_copy(update={"rotations": ("ffn", "heads", "keys")})
    plain, single = update_on(changed_config(name), Scan(), None), update_on(config, Scan(), None)
    assert abs(single[0]["loss"] - plain[0]["loss"]) > 1e-4
    same(single, update_on(config, Scan(), GRID))


@pytest.mark.parametrize("name", [n if n == "dense" else pytest.param(n, marks=pytest.mark.slow) for n in CHANGES])
def test_other_rules_change_no_number(name):
    """Weights laid out otherwise than activations expect."""
    config, rules = changed_config(name), ["embed:tensor", "heads:fsdp", "vocab:none", "ffn:none"]
    same(update_on(config, Scan(), {"fsdp": 2, "tensor": 2}, rules=rules), update_on(config, Scan(), None))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["experts", "a capacity", "latent attention", "delta nets"])
def test_experts_and_sequences_over_devices_change_no_number(name):
    config, run = changed_config(name), Unroll()
    metrics = ("loss", "grad_norm", *(("experts_dropped",) if name == "a capacity" else ()))
    same(update_on(config, run, None), update_on(config, run, {"fsdp": 2, "context": 2, "expert": 2}), metrics)


@pytest.mark.parametrize("name", [n if n == "dense" else pytest.param(n, marks=pytest.mark.slow) for n in CHANGES])
def test_weights_gathered_once_for_all_parts_change_no_number(name):
    config, run, sizes = changed_config(name), Scan(), {"fsdp": 2, "tensor": 2}
    # A capacity is that of a part.
    same(update_on(config, run, None, accumulate=2), update_on(config, run, sizes, accumulate=2, gather="once"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["experts", "latent attention"])
def test_weights_of_split_experts_gathered_once_change_no_number(name):
    config, run, sizes = changed_config(name), Unroll(), {"fsdp": 2, "context": 2, "expert": 2}
    same(update_on(config, run, None, accumulate=2), update_on(config, run, sizes, accumulate=2, gather="once"))


@pytest.mark.parametrize("sizes", [{"fsdp": 2, "context": 4}, {"fsdp": 2, "context": 2, "tensor": 2}], ids=["context 4", "all"])
@pytest.mark.parametrize("name", [n if n == "dense" else pytest.param(n, marks=pytest.mark.slow) for n in CHANGES])
def test_sequences_over_devices_change_no_number(name, sizes):
    config, run = changed_config(name), Unroll()
    metrics = ("loss", "grad_norm", *(("experts_dropped",) if name == "a capacity" else ()))
    same(update_on(config, run, None), update_on(config, run, sizes), metrics)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["blocks", "chunks"])
def test_sequences_over_devices_change_no_loss(head):
    """The other ways to compute the loss merge rows and times, which cannot both be split then."""
    config = changed_config("dense")
    same(update_on(config, Scan(), None, head=head), update_on(config, Scan(), {"fsdp": 2, "context": 2, "tensor": 2}, head=head))


@pytest.mark.slow
@pytest.mark.parametrize("name", [n if n == "dense" else pytest.param(n, marks=pytest.mark.slow) for n in MODELS])
def test_a_context_axis_splits_the_work(name):
    """Products that merged rows and times had all tokens gathered: 1.21 of 1.34 GFLOP were left on each of two devices."""
    config = config_of(name)
    single, two, four = (step_cost(config, sizes) for sizes in ({"fsdp": 1}, {"fsdp": 1, "context": 2}, {"fsdp": 1, "context": 4}))
    assert single.flops > 1.8 * two.flops > 3.4 * four.flops
    assert single.temporary_bytes > 1.5 * two.temporary_bytes > 2.4 * four.temporary_bytes
    # Keys and values go round, in pieces that get smaller.
    assert four.collective_bytes <= two.collective_bytes


EXPERT_MESHES = {
    "expert 2": {"data": 4, "fsdp": 1, "expert": 2},
    "expert 4": {"fsdp": 2, "expert": 4},
    "expert 2 x fsdp 2 x tensor 2": {"fsdp": 2, "expert": 2, "tensor": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("run", [Unroll(), Scan()], ids=lambda run: type(run).__name__)
@pytest.mark.parametrize("mesh", EXPERT_MESHES)
@pytest.mark.parametrize("name", ["experts", "a capacity", "latent attention"])
def test_experts_split_over_devices_change_no_number(name, mesh, run):
    """Nor what the router tells, nor the bias of a choice, which is among the weights."""
    config = changed_config(name)
    metrics = ("loss", "grad_norm", "router_balance", "router_z", "experts_idle", "expert_load_max", "experts_dropped")
    single, other = update_on(config, run, None), update_on(config, run, EXPERT_MESHES[mesh])
    assert single[0].keys() == other[0].keys()
    same(single, other, tuple(m for m in metrics if m in single[0]))


@pytest.mark.slow
@pytest.mark.parametrize("capacity", default(1.25, of=(1.25, None)))
def test_what_a_device_does_does_not_grow_with_the_devices_that_share_the_experts(capacity):
    """At four rows for each device. Its weights fall; what it computes, keeps and sends stays as it is."""
    config = config_of("experts")
    config = config.model_copy(update={"moe": config.moe.model_copy(update={"capacity": capacity})})
    two, eight = (step_cost(config, {"fsdp": 1, "expert": n}, 4 * n) for n in (2, 8))
    alone = step_cost(config, {"fsdp": 1}, 4)
    experts = 2 * 3 * 8 * 64 * 64 * 4  # bytes: layers, projections, E, D, M
    # The batch and the router add a little.
    assert alone.argument_bytes - eight.argument_bytes == pytest.approx(7 / 8 * experts, rel=0.02)
    assert eight.flops < 1.02 * two.flops
    assert eight.temporary_bytes < 1.02 * two.temporary_bytes
    assert eight.collective_bytes < 1.02 * two.collective_bytes
    assert two.collectives["all-to-all"] > 0


def test_tokens_that_go_to_every_expert_change_no_number():
    """One round of rows is then enough, whatever the load."""
    config = config_of("experts", moe=EXPERTS | {"count": 2})
    same(update_on(config, Scan(), None), update_on(config, Scan(), {"data": 1, "fsdp": 2, "expert": 2}))


@pytest.mark.parametrize("sizes", [{"fsdp": 2, "expert": 4}, {"fsdp": 8}], ids=["expert 4", "fsdp 8"])
def test_gradients_of_experts_are_scattered(sizes):
    """They were summed whole on every device."""
    costs = step_cost(config_of("experts"), {"data": 1, **sizes})
    assert costs.moved["reduce-scatter"] == 2 * 3 * 8 * 64 * 64 * 4 / 8  # bytes: layers, projections, E, D, M; of eight devices


@pytest.mark.tpu
@pytest.mark.parametrize("count", [8, 2])
def test_gradients_of_experts_are_scattered_in_the_type_they_are_computed_in(monkeypatch, count):
    mesh = MeshSettings(fsdp=2, expert=2).build(described_tpus(monkeypatch, "v5e:2x2"))
    config = config_of("experts", width=256, head_size=128, heads=2, kv_heads=2, ffn=512, moe=EXPERTS | {"ffn": 512, "count": count})
    module = HloModule.read(lowered_step(config.build(Scan("full")), mesh, 8, 256, "bfloat16").compile().as_text() or "")
    summed = [c for c in collectives(module, 4) if c.op_name.endswith("mlp/shard_map/reduce_scatter")]
    assert {c.kind for c in summed} == {"reduce-scatter"}
    assert {module.computations[c.computation].by_name[c.start].type[:4] for c in summed} == {"bf16"}
    # XLA may sum the third with the gradients of attention.
    share = 2 * count * 256 * 512 * 2 / 4  # bytes: layers, E, D, M, in bfloat16; of four devices
    assert sum(c.bytes * c.times for c in summed) >= 2 * share


THREE = {"data": 1, "fsdp": 2, "tensor": 2, "stage": 2}
WAYS = (("stage 2", STAGED["stage 2"], "full"), ("stage 4", STAGED["stage 4"], "none"), ("three", THREE, "dots"))
# The first layer of latent attention is of a kind of its own, and runs on all devices; delta nets repeat in groups of two.
DEEP = {"dense": 4, "experts": 4, "latent attention": 5, "delta nets": 8}


@pytest.mark.parametrize(
    ("name", "sizes", "mode"),
    [
        pytest.param(n, sizes, way, id=f"{n}-{mesh}-{way}", marks=() if (n, mesh) == ("dense", "three") else pytest.mark.slow)
        for n in DEEP
        for mesh, sizes, way in WAYS
    ],
)
def test_stages_change_no_number(name, sizes, mode):
    config, run = changed_config(name, layers=DEEP[name]), Pipeline(sizes["stage"], 4, mode)
    if name != "delta nets":
        same(update_on(config, Scan(), None), update_on(config, run, sizes))
        return
    # In float32, eight random layers of them magnify the rounding of rows computed apart: `accumulate=4` alone changes the norm of the
    # gradient by 3e-5. In float64 nothing hides a mistake.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        expected, other = (update_on(config, *arguments, precision="float64") for arguments in ((Scan(), None), (run, sizes)))
        same(expected, other, near=1e-10)


# With context and expert: sequences and experts are split within each stage.
BESIDE = {
    "context": {"data": 1, "fsdp": 1, "context": 2, "stage": 2},
    "context, fsdp": {"data": 1, "fsdp": 2, "context": 2, "stage": 2},
    "context, tensor": {"data": 1, "fsdp": 1, "context": 2, "tensor": 2, "stage": 2},
    "expert": {"data": 1, "fsdp": 1, "expert": 2, "stage": 2},
    "expert, tensor": {"data": 1, "fsdp": 1, "expert": 2, "tensor": 2, "stage": 2},
    "context, expert": {"data": 1, "fsdp": 1, "expert": 2, "context": 2, "stage": 2},
}
NESTED = [("dense", axes) for axes in ("context", "context, fsdp", "context, tensor")]
NESTED += [("experts", axes) for axes in ("expert", "expert, tensor")]
NESTED += [(name, "context, expert") for name in ("experts", "a capacity", "latent attention")]


@pytest.mark.parametrize("rounds", default(1, of=(1, 2)))
@pytest.mark.parametrize(("name", "axes"), default(("dense", "context"), of=NESTED))
def test_sequences_and_experts_split_within_stages_change_no_number(name, axes, rounds):
    """The ring and the exchange of rows are `shard_map`s within that of the stages."""
    config, run = changed_config(name, layers=DEEP.get(name, 4)), Pipeline(2, 4, "none", rounds)
    if name == "a capacity":
        config = config.model_copy(update={"moe": config.moe.model_copy(update={"balance_over": "sequence", "bias": True})})
    metrics = ("loss", "grad_norm", "router_balance", "router_z", "experts_idle", "expert_load_max", "experts_dropped")
    single, staged = update_on(config, Scan(rounds=rounds), None), update_on(config, run, BESIDE[axes])
    same(single, staged, tuple(m for m in metrics if m in single[0]))


@pytest.mark.parametrize(
    ("name", "sizes", "mode"),
    [
        pytest.param(n, sizes, way, id=f"{n}-{mesh}-{way}", marks=() if (n, mesh) == ("dense", "stage 2") else pytest.mark.slow)
        for n in ("dense", "experts")
        for mesh, sizes, way in WAYS
    ],
)
def test_rounds_change_no_number(name, sizes, mode):
    """Aux losses by layer, too: the second array of weights holds the later half of the layers."""
    layers = 2 * sizes["stage"]
    config, run = changed_config(name, layers=layers), Pipeline(sizes["stage"], 4, mode, 2)
    single, staged = update_on(config, Scan(), None), update_on(config, run, sizes)
    halves = {f"layers.block{n}.{a.removeprefix('layers.block.')}": w[half]
              for a, w in single[1].items() if a.startswith("layers.block.")
              for n, half in (("", slice(layers // 2)), ("_2", slice(layers // 2, None)))}  # fmt: skip
    cut = {a: w for a, w in single[1].items() if not a.startswith("layers.block.")} | halves
    assert cut.keys() == staged[1].keys()
    metrics = ("loss", "grad_norm", "router_balance", "router_z", "expert_load_max")
    same((single[0], cut), staged, tuple(m for m in metrics if m in single[0]), near=2e-5)


@pytest.mark.slow
def test_encoders_run_over_stages():
    """No objective trains one; its vectors and the gradients of its weights are those of scanned layers."""
    config = FAMILIES["bert"](**COMMON | {"layers": 4, "ffn": 256, "heads": 8})
    mesh = MeshSettings(**STAGED["stage 2"]).build(jax.devices()[:2])
    tokens = np.random.default_rng(0).integers(3, config.vocab, (8, 24))
    tokens[::2, -5:] = 0
    results = []
    for run in (Scan(), Pipeline(2, 4), Pipeline(2, 4, "full", 2)):
        graph, weights = split(noisy_model(config, run))

        def vectors(weights, graph=graph):
            model = merge(graph, weights)
            y = model.hidden(jnp.asarray(tokens), config.attend(jnp.asarray(tokens)))[0]
            return jnp.mean(y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)), y

        with scope(mesh):
            (_, y), gradient = jax.jit(jax.value_and_grad(vectors, has_aux=True))(weights)
        results.append((np.asarray(y), to_layers(merge(graph, weights), {a: np.asarray(g) for a, g in gradient.items()})))
    largest = max(np.abs(g).max() for g in results[0][1].values())
    for y, gradient in results[1:]:
        assert relative(y, results[0][0]) < 1e-5
        assert gradient.keys() == results[0][1].keys()
        for name, g in results[0][1].items():
            # That of the keys' biases is 0 but for rounding.
            assert np.abs(gradient[name] - g).max() <= 1e-4 * max(np.abs(g).max(), 0.01 * largest), name


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_rounds_leave_stages_idle_for_less(remat):
    """Products and steps as with as many microbatches more; what a device holds of the weights stays, and no weight is sent."""
    config, sizes = config_of("dense", layers=8), STAGED["stage 2"]
    rounds, more, plain = (
        step_cost(config, sizes, run=Pipeline(2, *arguments)) for arguments in ((4, remat, 2), (8, remat), (4, remat))
    )
    assert rounds.products == more.products < plain.products
    assert rounds.argument_bytes == plain.argument_bytes
    rows = ROWS * LENGTH * 64 * 4
    assert rounds.moved["collective-permute"] == 2 * (4 * 2 + 1) * rows / 4
    assert rounds.moved["all-gather"] == plain.moved["all-gather"] == 2 * rows
    assert rounds.moved["reduce-scatter"] == plain.moved["reduce-scatter"]
    # Beside what layers keep, the weights of a stage and their gradient are there once more while a step computes.
    assert rounds.temporary_bytes < plain.temporary_bytes + plain.argument_bytes


@pytest.mark.tpu
@pytest.mark.parametrize(("name", "axes"), [("dense", "context"), ("experts", "expert")])
@pytest.mark.parametrize("rounds", [1, 2])
def test_stages_beside_context_and_expert_compile_for_tpus(monkeypatch, name, axes, rounds):
    """Two stages of two devices: in rounds they send activations alone, as without."""
    mesh = MeshSettings(**BESIDE[axes]).build(described_tpus(monkeypatch, "v5e:2x2"))
    model = config_of(name, layers=4, width=256, head_size=128, heads=2, kv_heads=2).build(Pipeline(2, 4, "full", rounds))
    costs = cost(lowered_step(model, mesh, 8, 512, "bfloat16").compile())
    assert costs.moved["collective-permute"] > 0
    if name == "experts":
        # Rounds of rows are as many as it takes, so how often the loop around them runs is not in the program.
        assert costs.moved["all-to-all"] > 0
        return
    steps, a_microbatch = 4 * rounds + 1, 2 * 512 * 256 * 2 // 2
    assert costs.moved["collective-permute"] >= 2 * steps * a_microbatch


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "experts"])
def test_weights_gathered_once_over_stages_change_no_number(name):
    config = changed_config(name, layers=4)
    single, staged = (
        update_on(config, Scan(), None, accumulate=2),
        update_on(config, Pipeline(2, 2), THREE, accumulate=2, gather="once"),
    )
    same(single, staged)


@pytest.mark.slow
def test_stages_count_experts_as_one_device_does():
    """Loads are sums over microbatches, aux losses and dropped tokens are of each row: all as without stages, by layer."""
    config = changed_config("experts", layers=4)
    config = config.model_copy(update={"moe": config.moe.model_copy(update={"capacity": 0.7, "bias": True})})
    metrics = ("loss", "grad_norm", "router_balance", "router_z", "experts_dropped", "expert_load_max", "experts_idle")
    single, staged = update_on(config, Scan(), None), update_on(config, Pipeline(2, 4), THREE)
    assert single[0]["experts_dropped"] > 0.01
    same(single, staged, metrics)


@pytest.mark.slow
def test_microbatches_are_rows_that_divide():
    model = noisy_model(config_of("dense", layers=2), Pipeline(2, 4))
    mesh = MeshSettings(**STAGED["stage 2"]).build(jax.devices()[:2])
    tokens = jnp.ones((6, 8), jnp.int32)
    with scope(mesh), pytest.raises(ValueError, match="6 rows do not divide into 4 microbatches"):
        jax.eval_shape(lambda: model(tokens, model.config.attend(tokens)))


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 4])
def test_a_stage_has_its_share_of_the_layers(stages):
    sizes, width, vocab = STAGED[f"stage {stages}"], 64, 512
    short, deep = (config_of("dense", layers=n) for n in (4, 8))
    single, more = staged_cost(short, STAGED["1"]), staged_cost(deep, STAGED["1"])
    staged, further = staged_cost(short, sizes), staged_cost(deep, sizes)
    # What four layers add in weights and in products, and the steps in which a stage computes on nothing of use.
    assert more.argument_bytes - single.argument_bytes == stages * (further.argument_bytes - staged.argument_bytes)
    steps = MICROBATCHES + stages - 1
    assert stages * MICROBATCHES * (further.products - staged.products) == steps * (more.products - single.products)
    # The head is computed once, and not by each stage.
    head = single.products - (more.products - single.products)
    assert stages * (staged.products - (further.products - staged.products)) == head
    # Depth sends nothing: activations go from stage to stage, in at the first and out of the last, and back.
    assert further.moved == staged.moved
    rows = ROWS * LENGTH * width * 4
    assert staged.moved["collective-permute"] == 2 * steps * rows / MICROBATCHES
    assert staged.moved["all-gather"] == 2 * rows
    assert staged.moved["reduce-scatter"] == 2 * rows / stages
    # The gradients of what all stages have: embeddings, norms and the metrics.
    assert staged.moved["all-reduce"] < 2 * (vocab + 8) * width * 4
    assert set(staged.moved) == {"collective-permute", "all-gather", "reduce-scatter", "all-reduce"}


@pytest.mark.slow
def test_accumulation_changes_no_aux_loss():
    """The balance loss is a product of means: taken over the rows computed together, its gradient was 8.5 % off in four parts. Over
    each sequence it is exact, and so are dropped tokens."""
    config = changed_config("experts")
    config = config.model_copy(update={"moe": config.moe.model_copy(update={"capacity": 0.7, "balance": 1.0})})
    same(
        update_on(config, Unroll(), None),
        update_on(config, Unroll(), None, accumulate=4),
        ("loss", "router_balance", "experts_dropped"),
    )
    over_batch = config.model_copy(update={"moe": config.moe.model_copy(update={"balance_over": "batch"})})
    single, four = (update_on(over_batch, Unroll(), None, accumulate=n) for n in (1, 4))
    assert abs(single[0]["router_balance"] - four[0]["router_balance"]) > 1e-4, "nothing to be exact about"


def test_constrain_lays_out_what_divides_and_leaves_the_rest():
    x = jnp.ones((4, 6, 8))
    assert constrain(x, "B T D") is x, "there is no mesh"
    with scope(MeshSettings(**GRID).build()):
        assert activation_spec("B T D", (4, 6, 8)) == jax.sharding.PartitionSpec(("data", "fsdp"), None, None)
        assert activation_spec("B T D", (2, 6, 8)) == jax.sharding.PartitionSpec(("data",), None, None)
        assert activation_spec("B T V", (1, 6, 8)) == jax.sharding.PartitionSpec(None, None, ("tensor",))
        assert constrain(x[:1], "B T D").shape == (1, 6, 8)
        assert platform() == "cpu"


@pytest.mark.tpu
def test_a_program_is_compiled_for_the_devices_of_its_mesh(monkeypatch):
    """Also for devices that are not here."""
    with scope(MeshSettings().build(described_tpus(monkeypatch, "v5e:2x2"))):
        assert platform() == "tpu"
