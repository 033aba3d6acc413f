"""Tables of compiled programs, against programs whose work is counted by hand; dumps of XLA as they lie on disk; two programs apart."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from argosy.cli import main
from argosy.core.errors import BadInput
from argosy.jobs.hlo import program_file, read_program
from argosy.observe.hlo import cost
from argosy.observe.hlo.module import HloModule
from argosy.observe.hlo.summary import Difference, program_differences, summarize
from argosy.parallel.mesh import MeshSettings


def compile_program(f, *shapes):
    return jax.jit(f).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile()


def apply_layers(x, w):
    with jax.named_scope("layers"):
        x = jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=7)[0]
    with jax.named_scope("head"):
        return x @ w.T


def summary_of(program):
    return summarize(HloModule.read(program.as_text()))


def test_loops_count_as_often_as_they_run_and_layers_have_their_names():
    program = compile_program(apply_layers, (4, 8), (8, 8))
    summary = summary_of(program)
    product = 2 * 4 * 8 * 8
    assert summary.flops == 8 * product == cost(program).products
    layers = {work.name: work for work in summary.layers}
    assert layers["layers"].flops == 7 * product
    assert layers["head"].flops == product
    kinds = {work.name: work for work in summary.kinds}
    assert kinds["matrix products"].count == 8
    # Each reads a row of inputs and the weights, and writes a row.
    assert kinds["matrix products"].bytes >= 8 * 4 * (4 * 8 + 8 * 8 + 4 * 8)
    assert summary.argument_bytes == 4 * (4 * 8 + 8 * 8)


def test_the_biggest_value_is_the_planted_one():
    def f(x):
        with jax.named_scope("mlp"):
            wide = x @ x.T
        return wide @ x

    [first, *_] = summary_of(compile_program(f, (300, 5))).values
    assert (first.bytes, first.type, first.layer) == (4 * 300 * 300, "f32[300,300]", "mlp")


def test_collectives_are_counted_with_their_devices():
    mesh = MeshSettings(data=8, fsdp=1).build()

    def ring(x):
        right = [(i, (i + 1) % 8) for i in range(8)]
        return jax.lax.scan(lambda x, _: (jax.lax.ppermute(x, "data", right), None), x, None, length=5)[0]

    sharded_ring = jax.shard_map(ring, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    [transfer] = summary_of(compile_program(sharded_ring, (16, 3))).transfers
    assert (transfer.kind, transfer.count, transfer.bytes) == ("collective-permute", 5, 5 * 2 * 3 * 4)


def test_two_programs_differ_by_what_was_planted():
    a = summary_of(compile_program(apply_layers, (4, 8), (8, 8)))
    assert program_differences(a, summary_of(compile_program(apply_layers, (4, 8), (8, 8)))) == []

    def twice(x, w):
        y = apply_layers(x, w)
        with jax.named_scope("head"):
            return jax.lax.optimization_barrier(y) @ w

    rows = {(row.table, row.name): row for row in program_differences(a, summary_of(compile_program(twice, (4, 8), (8, 8))))}
    head = rows["layer", "head"]
    assert head.after["flops"] - head.before["flops"] == 2 * 4 * 8 * 8
    assert ("layer", "layers") not in rows


GPU = """\
HloModule jit_step, is_scheduled=true

%fused_add (p.1: f32[64,64], p.2: f32[64,64]) -> f32[64,64] {
  %p.1 = f32[64,64]{1,0} parameter(0)
  %p.2 = f32[64,64]{1,0} parameter(1)
  ROOT %add.1 = f32[64,64]{1,0} add(f32[64,64]{1,0} %p.1, f32[64,64]{1,0} %p.2), metadata={op_name="jit(step)/layers.1/mlp/add"}
}

%sum (x.1: f32[], x.2: f32[]) -> f32[] {
  %x.1 = f32[] parameter(0)
  %x.2 = f32[] parameter(1)
  ROOT %s.1 = f32[] add(f32[] %x.1, f32[] %x.2)
}

ENTRY %main (a.1: f32[64,64], b.1: f32[64,64]) -> f32[64,64] {
  %a.1 = f32[64,64]{1,0} parameter(0)
  %b.1 = f32[64,64]{1,0} parameter(1)
  %all-reduce-start.1 = f32[64,64]{1,0} all-reduce-start(f32[64,64]{1,0} %a.1), replica_groups={{0,1}}, to_apply=%sum, metadata={op_name="jit(step)/transpose(jvp(layers.0))/psum"}
  %loop_add_fusion = f32[64,64]{1,0} fusion(f32[64,64]{1,0} %a.1, f32[64,64]{1,0} %b.1), kind=kLoop, calls=%fused_add
  %all-reduce-done.1 = f32[64,64]{1,0} all-reduce-done(f32[64,64]{1,0} %all-reduce-start.1)
  ROOT %dot.1 = f32[64,64]{1,0} dot(f32[64,64]{1,0} %loop_add_fusion, f32[64,64]{1,0} %all-reduce-done.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/head/dot_general"}
}
"""  # noqa: E501


def test_a_program_of_a_gpu_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    summary = summarize(HloModule.read(GPU))
    assert summary.flops == 2 * 64**3
    assert {work.name for work in summary.layers} >= {"layers.1/mlp", "head"}
    [transfer] = summary.transfers
    assert (transfer.kind, transfer.devices, transfer.asynchronous, transfer.layer) == ("all-reduce", 2, 1, "layers.0 backward")
    with gzip.open(tmp_path / "module_0001.jit_step.gpu_after_optimizations.txt.gz", "wt") as file:
        file.write(GPU)
    assert main(["hlo", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["flops"] == 2 * 64**3
    assert main(["hlo", str(tmp_path), str(tmp_path)]) == 0
    assert "no differences" in capsys.readouterr().out


@pytest.mark.slow
def test_a_dump_of_xla_is_read_as_it_lies_there(tmp_path: Path):
    code = "import jax, jax.numpy as jnp; jax.jit(lambda a, b: jnp.tanh(a @ b)).lower(jnp.ones((32, 64)), jnp.ones((64, 16))).compile()"
    flags = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)
    path = program_file(str(tmp_path))
    assert path.name.endswith("after_optimizations.txt")
    assert summarize(read_program(path)).flops == 2 * 32 * 64 * 16


def test_what_is_no_program_says_how_to_get_one(tmp_path: Path):
    with pytest.raises(BadInput, match="no run and no dump"):
        program_file(str(tmp_path / "gone"))
    with pytest.raises(BadInput, match="has no program") as error:
        program_file(str(tmp_path))
    assert "profile.program=true" in str(error.value.hint)
    (tmp_path / "x.txt").write_text("module {")
    with pytest.raises(BadInput, match="no text of an HLO module"):
        read_program(tmp_path / "x.txt")


def test_a_row_that_only_one_program_has_counts_with_all_its_bytes():
    assert Difference("buffers", "x", {"bytes": 7}, {"bytes": 9}).bytes == 2
    assert Difference("buffers", "x", None, {"bytes": 9}).bytes == 9
    assert Difference("buffers", "x", {"bytes": 7}, None).bytes == -7
