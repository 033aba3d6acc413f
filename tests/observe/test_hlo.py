"""What is read from the text of a compiled program, against programs whose products and bytes are counted by hand."""

import jax
import jax.numpy as jnp
import pytest
from helpers import described_tpus
from jax.sharding import PartitionSpec as P

from argosy.core.errors import Unsupported
from argosy.models.parts.stack import Scan
from argosy.observe.hlo import collective_bytes, cost
from argosy.observe.hlo.collectives import collectives
from argosy.observe.hlo.loops import SELDOM
from argosy.observe.hlo.module import HloModule
from argosy.observe.hlo.products import product_flops, uncounted_kernels
from argosy.observe.hlo.text import type_bytes
from argosy.parallel.mesh import MeshSettings
from tools.devices import config_of, lowered_step


def apply_loop(x, w, times):
    return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=times)[0]


@pytest.mark.parametrize("times", [1, 7])
def test_products_in_loops_count_as_often_as_they_run(times):
    x, w = jnp.ones((4, 8)), jnp.ones((8, 8))
    product = 2 * 4 * 8 * 8
    assert cost(jax.jit(lambda x, w: apply_loop(x, w, times)).lower(x, w).compile()).products == times * product
    nested = jax.jit(lambda x, w: jax.lax.scan(lambda x, _: (apply_loop(x, w, times) @ w, None), x, None, length=5)[0])
    assert cost(nested.lower(x, w).compile()).products == 5 * (times + 1) * product


def test_collectives_in_loops_count_as_often_as_they_run():
    mesh = MeshSettings(data=8, fsdp=1).build()

    def ring(x):
        right = [(i, (i + 1) % 8) for i in range(8)]
        return jax.lax.scan(lambda x, _: (jax.lax.ppermute(x, "data", right), None), x, None, length=5)[0]

    sharded_ring = jax.shard_map(ring, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    costs = cost(jax.jit(sharded_ring).lower(jax.ShapeDtypeStruct((16, 3), jnp.float32)).compile())
    assert costs.collectives == {"collective-permute": 2 * 3 * 4}
    assert costs.moved == {"collective-permute": 5 * 2 * 3 * 4}


@pytest.mark.parametrize(
    ("groups", "counts"),
    [
        ("{{0},{1}}", False),
        ("{{0,1},{2,3}}", True),
        ("[8,1]<=[8]", False),
        ("[2,4]<=[8]", True),
        ("mesh['axis_0'=1,'axis_1'=8] {'axis_0'}", False),
        ("mesh['axis_0'=1,'axis_1'=4,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_1'}", True),
        ("mesh['a'=1,'b'=8] {'a','b'}", True),
        ("mesh['a'=8] {'a':(1)2}", True),
    ],
)
def test_a_collective_of_one_device_moves_nothing(groups: str, counts: bool):
    line = f"  %r = f32[4,2]{{1,0}} all-reduce(f32[4,2]{{1,0}} %x), channel_id=1, replica_groups={groups}, to_apply=%sum"
    text = f"ENTRY %main (x: f32[4,2]) -> f32[4,2] {{\n{line}\n}}\n"
    assert collective_bytes(text) == ({"all-reduce": 32} if counts else {})


def flops_by_xla(f, *shapes, **options):
    compiled = jax.jit(f).lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).compile(**options)
    return (compiled.cost_analysis() or {})["flops"], str(compiled.as_text())


@pytest.mark.parametrize(
    "window",
    [
        {"window_strides": (2, 1), "padding": ((1, 2), (0, 3))},
        {"window_strides": (1, 3), "padding": "SAME", "rhs_dilation": (2, 1)},
        {"window_strides": (1, 1), "padding": ((3, 1), (2, 2)), "lhs_dilation": (2, 3)},
        {"window_strides": (1, 1), "padding": "VALID", "feature_group_count": 2},
    ],
    ids=["strides", "dilated kernel", "dilated input", "groups"],
)
def test_products_of_convolutions_are_as_xla_counts_them(window):
    """XLA counts no position in the padding, and that is how a matrix product over padding is told from a convolution."""
    inputs = 6 // window.get("feature_group_count", 1)
    expected, text = flops_by_xla(lambda x, w: jax.lax.conv_general_dilated(x, w, **window), (2, 6, 9, 11), (4, inputs, 3, 5))
    assert product_flops(HloModule.read(text)) == expected > 0


# A loop as TPUs have it: no annotation; its condition compares the counter, which starts at 1, with a limit inside a fusion.
ON_TPU = """HloModule jit_f, is_scheduled=true

%compared (p0: s32[], p1: s32[]) -> pred[] {
  %p0 = s32[]{:T(128)} parameter(0)
  %p1 = s32[]{:T(128)} parameter(1)
  ROOT %lt = pred[]{:T(512)} compare(%p0, %p1), direction=DIRECTION
}

%condition (state: (s32[], bf16[4,8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(7)
  %state = (s32[]{:T(128)}, bf16[4,8]{1,0:T(4,128)(2,1)}) parameter(0)
  %counter = s32[]{:T(128)} get-tuple-element(%state), index=0
  ROOT %fused = pred[]{:T(512)} fusion(%counter, %limit), kind=kLoop, calls=%compared
}

%body (state.1: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %state.1 = (s32[]{:T(128)}, /*index=1*/bf16[4,8]{1,0:T(4,128)(2,1)}) parameter(0)
  %counter.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  %one = s32[]{:T(128)} constant(STEP)
  %next = s32[]{:T(128)} add(%counter.1, %one)
  %x = bf16[4,8]{1,0:T(4,128)(2,1)} get-tuple-element(%state.1), index=1
  %product = bf16[4,4]{1,0:T(4,128)(2,1)} convolution(%x, %x), dim_labels=bf_oi->bf, metadata={op_name="jit(f)/dot_general"}
  ROOT %both = (s32[]{:T(128)}, bf16[4,8]{1,0:T(4,128)(2,1)}) tuple(%next, %x)
}

ENTRY %main (x.1: bf16[4,8]) -> bf16[4,8] {
  %x.1 = bf16[4,8]{1,0:T(4,128)(2,1)} parameter(0)
  %first = s32[]{:T(128)} constant(1)
  %begin = (s32[]{:T(128)}, bf16[4,8]{1,0:T(4,128)(2,1)}) tuple(%first, %x.1)
  %while.3 = (s32[]{:T(128)}, bf16[4,8]{1,0:T(4,128)(2,1)}) while(%begin), condition=%condition, body=%body
  ROOT %out = bf16[4,8]{1,0:T(4,128)(2,1)} get-tuple-element(%while.3), index=1
}
"""


@pytest.mark.parametrize(("direction", "step", "times"), [("LT", 1, 6), ("LE", 1, 7), ("LT", 4, 2), ("NE", 2, 3), ("GT", 1, None)])
def test_a_loop_without_annotation_is_counted_from_its_condition(direction, step, times):
    program = HloModule.read(ON_TPU.replace("DIRECTION", direction).replace("STEP", str(step)))
    assert program.trips == {"while.3": times}
    assert program.unknown_loops == ([] if times else ["while.3"])
    text = ON_TPU.replace("DIRECTION", direction).replace("STEP", str(step))
    assert product_flops(HloModule.read(text)) == (times or 1) * 2 * 4 * 4 * 8


def test_a_loop_that_seldom_runs_does_not_count():
    text = ON_TPU.replace("DIRECTION", "GT").replace("STEP", "1")
    scope = f'body=%body, metadata={{op_name="jit(f)/shard_map/{SELDOM}/while"}}'
    program = HloModule.read(text.replace("body=%body", scope))
    assert (program.trips, program.unknown_loops, product_flops(program)) == ({"while.3": 0}, [], 0)


# An asynchronous gather of a TPU: three fusions that start, carry and end it, each with a copy of it. Shortened from a program.
CHAIN = """HloModule jit_f, is_scheduled=true

%starts (p: bf16[4,2]) -> (bf16[4,2], bf16[4,8], u32[]) {
  %p = bf16[4,2]{1,0:T(8,128)(2,1)} parameter(0)
  %all-gather.1 = bf16[4,8]{1,0:T(8,128)(2,1)} all-gather(%p), GATHERED
  ROOT %custom-call.1 = (bf16[4,2], bf16[4,8]{1,0}, u32[]) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.2 (p.1: bf16[4,2], p.2: f32[8]) -> (f32[8], bf16[4,8]) {
  %p.1 = bf16[4,2]{1,0} parameter(0)
  %p.2 = f32[8]{0} parameter(1)
  %all-gather.2 = bf16[4,8]{1,0} all-gather(%p.1), GATHERED
  ROOT %t = (f32[8]{0}, bf16[4,8]{1,0}) tuple(%p.2, %all-gather.2)
}

%ends (p.3: bf16[4,2]) -> bf16[4,8] {
  %p.3 = bf16[4,2]{1,0} parameter(0)
  %all-gather.3 = bf16[4,8]{1,0} all-gather(%p.3), GATHERED
  ROOT %custom-call.3 = bf16[4,8]{1,0} custom-call(%p.3, %all-gather.3), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter.4 (p.4: f32[8]) -> f32[2] {
  %p.4 = f32[8]{0} parameter(0)
  %all-reduce.4 = f32[8]{0} all-reduce(%p.4), channel_id=9, replica_groups={{0,1,2,3}}, to_apply=%sum
  ROOT %slice = f32[2]{0} dynamic-slice(%all-reduce.4), dynamic_slice_sizes={2}
}

ENTRY %main (x: bf16[4,2], y: f32[8]) -> f32[2] {
  %x = bf16[4,2]{1,0} parameter(0)
  %y = f32[8]{0} parameter(1)
  %start = (bf16[4,2]{1,0}, bf16[4,8]{1,0}, u32[]{:S(2)}) fusion(%x), kind=kCustom, calls=%starts
  %x.1 = bf16[4,2]{1,0} get-tuple-element(%start), index=0
  %work = (f32[8]{0}, bf16[4,8]{1,0}) fusion(%x.1, %y), kind=kOutput, calls=%async_collective_fusion.2
  %done = bf16[4,8]{1,0} fusion(%x.1), kind=kCustom, calls=%ends
  %permuted = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%y), channel_id=3, source_target_pairs={{0,1},{1,2}}
  %back = f32[8]{0} collective-permute-done(%permuted)
  ROOT %scattered = f32[2]{0} fusion(%back), kind=kCustom, calls=%all-reduce-scatter.4
}
""".replace("GATHERED", """channel_id=7, replica_groups=mesh['x'=1,'y'=4] {'y'}, dimensions={1}, frontend_attributes={chain_id="0"}""")


def test_an_asynchronous_collective_counts_once():
    gather, permute, scatter = collectives(HloModule.read(CHAIN))
    assert (gather.kind, gather.bytes, gather.asynchronous, gather.start, gather.end) == ("all-gather", 64, True, "start", "done")
    assert (permute.kind, permute.bytes, permute.asynchronous, permute.end) == ("collective-permute", 32, True, "back")
    assert (scatter.kind, scatter.bytes, scatter.asynchronous) == ("reduce-scatter", 8, False)
    assert (gather.axes({"data": 1, "fsdp": 4}), permute.axes({"fsdp": 4})) == (("fsdp",), ("fsdp",))


AXES = [("data",), ("fsdp",), ("tensor",), ("data", "tensor"), ("fsdp", "tensor"), ("data", "fsdp", "tensor")]


@pytest.mark.parametrize("axes", AXES, ids="-".join)
def test_a_collective_names_the_axes_of_the_mesh_that_it_goes_along(axes):
    mesh = MeshSettings(data=2, fsdp=2, tensor=2).build()

    def summed(x):
        return jax.lax.psum(x, axes)

    others = P(tuple(a for a in mesh.axis_names if a not in axes))
    f = jax.jit(jax.shard_map(summed, mesh=mesh, in_specs=P(("data", "fsdp", "tensor")), out_specs=others))
    (collective,) = collectives(HloModule.read(f.lower(jax.ShapeDtypeStruct((8, 3), jnp.float32)).compile().as_text() or ""))
    assert collective.kind == "all-reduce"
    assert set(collective.axes(mesh.shape)) == set(axes)
    assert collective.size == 2 ** len(axes)


@pytest.mark.parametrize(
    ("type_", "size"),
    [("s4[3,5]{1,0}", 8), ("(u2[4], f8e4m3fn[3,2]{1,0}, pred[])", 8), ("f4e2m1fn[7]", 4), ("(c64[2], token[])", 16), ("f32[<=6]", 24)],
)
def test_bytes_of_types(type_: str, size: int):
    assert type_bytes(type_) == size


def test_an_unknown_type_is_an_error():
    with pytest.raises(Unsupported, match="`f3e1m1`"):
        type_bytes("f3e1m1[8]")


def test_an_instruction_may_span_lines():
    """Kernels carry their metadata with line breaks, also with lines that look like the end of a computation."""
    target = 'custom_call_target="AsyncCollectiveStart"'
    broken = CHAIN.replace(target, target + ', frontend_attributes={m={\n}\n  "a": [\n}}}')
    assert [i.name for i in HloModule.read(broken).computations["starts"].instructions] == ["p", "all-gather.1", "custom-call.1"]
    assert len(collectives(HloModule.read(broken))) == 3


KERNELS = """ENTRY %main (q: bf16[2,8,512,128]) -> f32[2,8,512] {
  %q = bf16[2,8,512,128]{3,2,1,0} parameter(0)
  %k = bf16[2,4,256,128]{3,2,1,0} parameter(1)
  %mask = s8[1,1,1]{2,1,0} parameter(2)
  %splash_mha_fwd_residuals.1 = bf16[2,8,512,128]{3,2,1,0} custom-call(%mask, %q, %k, %k), TPU_KERNEL
  %splash_mha_dkv.1 = (bf16[2,4,256,128]{3,2,1,0}, bf16[2,4,256,128]{3,2,1,0}) custom-call(%mask, %q, %k, %k, %q), TPU_KERNEL
  %rows = bf16[512,64]{1,0} parameter(5)
  %experts = bf16[8,64,128]{2,1,0} parameter(6)
  %g = bf16[512,128]{1,0} parameter(7)
  %sizes = s32[8]{0} parameter(8)
  %jvp_jit_gmm__.2 = bf16[512,128]{1,0} custom-call(%sizes, %rows, %experts), TPU_KERNEL
  %ragged-dot-none.3 = bf16[512,128]{1,0} custom-call(%sizes, %rows, %experts), TPU_KERNEL
  %transpose_jvp_jit_tgmm___.2 = bf16[8,64,128]{2,1,0} custom-call(%sizes, %rows, %g), TPU_KERNEL
  %other_kernel.1 = f32[4]{0} custom-call(%q), TPU_KERNEL
  %a = bf16[6,8]{1,0} parameter(3)
  %b = bf16[8,4]{1,0} parameter(4)
  %gemm = (bf16[6,4]{1,0}, s8[32]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", DOT
  ROOT %r = f32[2,8,512]{2,1,0} custom-call(%q), custom_call_target="Sharding"
}
""".replace("TPU_KERNEL", 'custom_call_target="tpu_custom_call"').replace(
    "DOT", 'backend_config={"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}'
)


def test_kernels_are_counted_by_their_shapes_and_the_others_named():
    unit = 2 * 2 * 8 * 512 * 256 * 128
    grouped = 2 * 512 * 64 * 128
    assert product_flops(HloModule.read(KERNELS)) == 2 * unit + 4 * unit + 3 * grouped + 2 * 6 * 8 * 4
    assert uncounted_kernels(HloModule.read(KERNELS)) == ["other_kernel"]


@pytest.mark.tpu
def test_a_training_step_for_tpus_is_read_whole(monkeypatch: pytest.MonkeyPatch):
    """XLA's own FLOPs of this program are a third of it, and asynchronous gathers are written four times."""
    layers, width, ffn, vocab, length, rows = 3, 256, 1024, 512, 256, 2
    config = config_of("dense", width=width, ffn=ffn, heads=2, kv_heads=2, head_size=128, vocab=vocab, layers=layers, context=length)
    mesh = MeshSettings(fsdp=4).build(described_tpus(monkeypatch, "v5e:2x2"))
    compiled = lowered_step(config.build(Scan()), mesh, 4 * rows, length, "bfloat16").compile()
    costs = cost(compiled)
    weights = layers * (4 * width * width + 3 * width * ffn) + vocab * width
    attention = layers * 2 * (2 + 3 + 4) * rows * length * length * width
    assert costs.products == pytest.approx(6 * weights * rows * length + attention, rel=0.02)
    assert costs.flops < 0.6 * costs.products
    assert (costs.uncounted, costs.unknown_loops) == ((), ())
    # Every weight in bfloat16, for the forward pass and again for the backward pass where it is not kept.
    assert 2 * weights < costs.moved["all-gather"] < 2.6 * 2 * weights
    assert {axis for collective in collectives(HloModule.read(compiled.as_text() or "")) for axis in collective.axes(mesh.shape)} == {
        "fsdp"
    }
