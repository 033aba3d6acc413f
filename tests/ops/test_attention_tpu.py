"""Attention kernels in programs for TPUs, by the real compiler: a kernel whose blocks do not fit in fast memory is its error.

`./run test -m tpu` compiles each family for one kind of TPU, `-m 'tpu and slow'` each example for every kind.
"""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import described_tpus
from jax import export
from jax._src.mesh import AbstractDevice

from argosy.core.errors import Unsupported
from argosy.models.parts.stack import Scan, Unroll
from argosy.models.parts.weight import abstract, logical, merge, split
from argosy.ops.attention import Score, See, attention
from argosy.ops.attention.splash import splash
from argosy.ops.op import implementations
from argosy.parallel.mesh import MeshSettings
from argosy.parallel.rules import DEFAULT, shardings
from argosy.parallel.scope import scope
from tools.devices import config_of, lowered_step
from tools.seams import examples, fullest

KINDS = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2")
# Why training does not take the kernels.
REFUSED = {"deepseek-3.2": "queries do not choose their keys"} | dict.fromkeys(("t5-plain", "t5-umt5", "t5-gated"), "no bias")
# The fullest example of each family, and latent attention without an indexer.
BY_DEFAULT = {name: KINDS[i % len(KINDS)] for i, name in enumerate([*fullest(), "deepseek-3"])}


def kernels(text):
    """How often a program runs each kernel: forward, the backward pass of queries, of keys and values."""
    return Counter(re.findall(r"%splash_mha_(fwd|dq|dkv)[\w.]* = [^\n]*custom-call\(", text))


def each_family():
    for name in examples():
        for kind in KINDS:
            refused = "-refused" if name in REFUSED else ""
            marks = () if BY_DEFAULT.get(name) == kind else pytest.mark.slow
            yield pytest.param(name, kind, id=f"{name}-{kind.partition(':')[0]}{refused}", marks=marks)


def gradient_of(name, devices, rows=2, length=256):
    """The gradient of a small model in bfloat16 over float32 weights, for described devices; nothing is stored."""
    model = examples()[name].build(Scan())
    model.dtype = jnp.bfloat16
    graph, _ = split(model)
    mesh = MeshSettings(fsdp=len(devices)).build(devices)
    places = shardings(logical(model), {a: s.shape for a, s in abstract(model).items()}, DEFAULT, mesh)
    weights = {a: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=places[a]) for a, s in abstract(model).items()}
    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)

    def loss(weights, tokens, segments):
        return jnp.sum(jnp.sin(merge(graph, weights)(tokens, model.config.attend(segments))[0].astype(jnp.float32)))

    with scope(mesh):
        return jax.jit(jax.grad(loss, allow_int=True)).lower(weights, ids, ids)


@pytest.mark.tpu
@pytest.mark.parametrize(("name", "kind"), list(each_family()))
def test_every_family_trains_with_the_kernels(name, kind, monkeypatch):
    devices = described_tpus(monkeypatch, kind)[:1]
    if name in REFUSED:
        with implementations(attention="splash"), pytest.raises(Unsupported, match=REFUSED[name]):
            gradient_of(name, devices)
    text = gradient_of(name, devices).compile().as_text()
    counts = kernels(text)
    if name in REFUSED:
        assert not counts
    else:
        assert counts["fwd"] == counts["dq"] == counts["dkv"] > 0
        assert re.search(r"%splash_mha_fwd[\w.]* = [^\n]* bf16\[", text)


@pytest.mark.tpu
@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize("run", [Scan, Unroll], ids=["scan", "unroll"])
def test_the_forward_kernel_runs_once_a_step(run, remat, monkeypatch):
    """Also where layers are recomputed. Scanned, the two layers share the kernels of a loop's body."""
    mesh = MeshSettings(fsdp=1).build(described_tpus(monkeypatch, "v5e:2x2")[:1])
    model = config_of("dense").build(run(remat))
    each = 1 if run is Scan else 2
    assert kernels(lowered_step(model, mesh, 2, 256, "bfloat16").compile().as_text()) == {"fwd": each, "dq": each, "dkv": each}


@pytest.mark.tpu
def test_a_step_over_a_mesh_compiles(monkeypatch):
    """Rows and heads are split, and the gradients of a kernel are not gathered: its operands are those of one device."""
    mesh = MeshSettings(fsdp=2, tensor=2).build(described_tpus(monkeypatch, "v5p:2x2x1"))
    model = config_of("dense").build(Scan("full"))
    text = lowered_step(model, mesh, 4, 256, "bfloat16").compile().as_text()
    assert kernels(text) == {"fwd": 1, "dq": 1, "dkv": 1}
    # Of 4 rows, 8 heads of 16, padded to 64.
    assert re.search(r"%splash_mha_fwd[\w.]* = \([^)]*bf16\[2,4,256,64\]", re.sub(r"\{[^}]*\}", "", text))


def program(kind, monkeypatch, T, H, U, dtype=jnp.bfloat16, **score):
    """Value and gradient of the kernels, for a described TPU."""
    device = described_tpus(monkeypatch, kind)[0]
    on = jax.sharding.SingleDeviceSharding(device)
    shapes = [((1, T, 2, H), dtype), ((1, T, 1, H), dtype), ((1, T, 1, U), dtype), ((1, T), jnp.int32), ((2,), jnp.float32)]
    args = [jax.ShapeDtypeStruct(shape, kind, sharding=on) for shape, kind in shapes]

    def loss(q, k, v, segments, sinks):
        at = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (1, T))
        see = See(at, at, segments, segments, aligned=True)
        return jnp.sum(jnp.sin(splash(q, k, v, see, Score(0.1, sinks=sinks, **score)).astype(jnp.float32)))

    with jax.default_device(device):
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 4))).lower(*args)


# Each size of a block, of heads and of a number, with what takes most memory: a cap, sinks, segments.
SIZES = {
    "1024 tokens at once": (2048, 128, 128, jnp.bfloat16, {}),
    "large heads": (2048, 256, 256, jnp.float32, {}),
    "absorbed latents": (1024, 576, 512, jnp.bfloat16, {}),
    "latents": (300, 192, 128, jnp.float32, {}),
    "a short window": (2048, 128, 128, jnp.bfloat16, {"window": 128}),
    "odd": (130, 80, 72, jnp.bfloat16, {}),
}


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(n, k, marks=() if k == KINDS[i % 3] else pytest.mark.slow)
        for i, n in enumerate(SIZES)
        for k in (*KINDS, "v4:2x2x1")
    ],
)
def test_blocks_fit_in_fast_memory(name, kind, monkeypatch):
    *sizes, options = SIZES[name]
    compiled = program(kind, monkeypatch, *sizes, cap=30.0, **options).compile()
    assert kernels(compiled.as_text()) == {"fwd": 1, "dq": 1, "dkv": 1}


@pytest.mark.tpu
def test_blocks_that_do_not_fit_are_an_error(monkeypatch):
    """So the tests above can fail."""
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?i)vmem"):
        program("v5e:2x2", monkeypatch, 128, 16384, 16384, jnp.float32).compile()


def test_a_program_for_tpus_can_be_exported():
    """Without a TPU and without libtpu; its backward pass too."""
    described = jax.sharding.AbstractMesh((1,), ("data",), abstract_device=AbstractDevice("TPU v5 lite", 1, "tpu"))

    def call(q, k, v):
        at = jnp.broadcast_to(jnp.arange(256, dtype=jnp.int32), (2, 256))
        return attention(q, k, v, See(at, at, aligned=True), Score(0.1))

    args = [jax.ShapeDtypeStruct((2, 256, n, 64), jnp.bfloat16) for n in (4, 2, 2)]
    with jax.sharding.use_abstract_mesh(described):
        stored = export.export(jax.jit(call), platforms=["tpu"])(*args).serialize(vjp_order=1)
    read = export.deserialize(stored)
    assert read.platforms == ("tpu",)
    assert read.mlir_module().count("tpu_custom_call") == 1
    assert read.vjp().mlir_module().count("tpu_custom_call") == 3
    assert np.dtype(read.out_avals[0].dtype) == jnp.bfloat16
