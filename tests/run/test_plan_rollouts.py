"""`argosy plan grpo`: what rollouts take beside the trainer, against XLA's programs, engines that run, and counts by hand."""

import json
from typing import Any

import jax
import pytest

from argosy.cli import main
from argosy.core.errors import BadInput
from argosy.jobs.plan.training import PlanSettings, plan, plan_reading
from argosy.models.parts.attention.cache import bytes_of_caches
from argosy.observe.hlo.collectives import collectives
from argosy.observe.hlo.estimate import Prices
from argosy.observe.hlo.module import HloModule
from argosy.parallel.target import Target
from argosy.run.assembly.assemble import assemble
from argosy.run.assembly.decided import Decided
from argosy.run.plan.compiled_serving import lowered_step
from argosy.run.plan.rollouts import RolloutPlan, lengths_of_rollout, rollout_plan, trainer_target, update_assembly
from argosy.run.rl.rollout_engine import RolloutEngine

PRICES = Prices(flops_per_s=1e12, bytes_per_s=1e11, ring_bytes_per_s=1e10)
SHORT = ("data.sequence=256", "rollout.tokens=128")


def plan_document(*words: str, **settings: Any) -> dict[str, Any]:
    return plan("grpo", words, PlanSettings(compile=False, **settings), lambda _: None)


def parts(target: Target, *words: str, recipe: str = "grpo") -> tuple[Any, RolloutPlan]:
    run = plan_reading(recipe, ["model=argosy-1m", *SHORT, *words]).value
    mine = trainer_target(target, run)
    assembly = assemble(run, Decided.here(run, mine), target=mine, reads=False)
    return assembly, rollout_plan(assembly, 0, PRICES, target)


def test_a_step_has_its_rollouts_and_its_update():
    document = plan_document("model=llama3.2-1b", device="h100-8")
    rollouts = document["rollouts"]
    # The recipe's 64 completions of 512 tokens, 8 to each prompt, all at a time; a prompt has the rest of a row.
    sizes = (
        rollouts["completions"],
        rollouts["prompts"],
        rollouts["input_len"],
        rollouts["output_len"],
        rollouts["sequences"],
        rollouts["decode_steps"],
    )
    assert sizes == (64, 8, 512, 512, 64, 512)
    assert rollouts["cache_tokens"] == 64 * 1024
    # 16 layers with 8 heads of 64 for keys and values in bfloat16, whole on each device.
    assert rollouts["memory_bytes"]["cache"] == 64 * 1024 * 16 * 2 * 8 * 64 * 2
    assert (rollouts["weights"], rollouts["memory_bytes"]["weights"]) == ("shared", 0)
    assert rollouts["memory_bytes"]["state"] == document["memory_bytes"]["parameters"] + document["memory_bytes"]["optimizer"]
    assert document["rollout_seconds"] == pytest.approx(rollouts["prefill_seconds"] + 512 * rollouts["decode_step_seconds"])
    assert document["step_seconds"] == pytest.approx(document["update_seconds"] + document["rollout_seconds"])
    assert document["bound_by"].startswith("rollouts (")
    assert document["fits"]


def test_devices_that_only_sample_have_copies_and_may_run_beside_the_update():
    concurrent, after = (
        plan_document("model=llama3.2-1b", "rollout.devices=4", *more, device="h100-8") for more in (["rollout.ahead=1"], [])
    )
    assert concurrent["mesh"] == {"fsdp": 4}
    rollouts = concurrent["rollouts"]
    # A quarter of the weights in the trainer's float32, but for the norms.
    assert (rollouts["weights"], rollouts["devices"]) == ("copied", 4)
    assert rollouts["memory_bytes"]["weights"] == pytest.approx(4 * 1_235_814_400 / 4, rel=1e-3)
    assert {t["axis"] for t in rollouts["collectives"]} == {"tensor"}
    assert concurrent["step_seconds"] == max(concurrent["update_seconds"], concurrent["rollout_seconds"])
    assert after["step_seconds"] == pytest.approx(concurrent["update_seconds"] + concurrent["rollout_seconds"])
    with pytest.raises(BadInput, match="a plan counts the engine"):
        plan_document("model=llama3.2-1b", "rollout.processes=2", device="h100-8")
    again = plan_document("model=llama3.2-1b", "rollout.resample=2", device="h100-8")
    assert "not counted: rollout.resample" in again["note"]
    with pytest.raises(BadInput, match="none is left"):
        plan_document("model=llama3.2-1b", "rollout.devices=8", device="h100-8")


def test_updates_of_a_rollout_share_its_time():
    document = plan("ppo", ["model=llama3.2-1b"], PlanSettings(device="h100-8", compile=False), lambda _: None)
    rollouts = document["rollouts"]
    assert (rollouts["updates"], rollouts["prompts"]) == (4, 64)
    assert document["rollout_seconds"] == pytest.approx(rollouts["seconds"] / 4)
    # Log-probabilities of the sampling weights, and a critic's values.
    assert document["scoring_seconds"] > 0


def test_each_device_sums_what_its_features_give_as_xla_does():
    """The decode step over weights that fsdp splits, compiled for fake devices: XLA sums queries, keys and values together, gate and up
    together, two norms a layer, and the logits."""
    assembly, planned_rollouts = parts(Target.here(), "mesh.fsdp=8", "precision=bfloat16")
    rows = 8
    program = lowered_step(planned_rollouts.engine, planned_rollouts.size, (rows, 0, 100)).compile()
    sums = list(collectives(HloModule.read(program.as_text())))
    assert {collective.kind for collective in sums} == {"all-reduce"}
    (predicted,) = planned_rollouts.decode.traffic
    assert predicted.count == sum(collective.times for collective in sums)
    large = sum(collective.bytes * collective.times for collective in sums if collective.bytes > 4 * rows)
    assert predicted.bytes == large * planned_rollouts.decode.decodes // rows
    assert assembly.batches.shape.rows % 8 == 0


def test_memory_is_what_the_engine_of_a_run_allocates():
    """The engine grows with its requests, so its cache is that of the completions of a rollout."""
    assembly, planned_rollouts = parts(Target.here(jax.devices()[:1]))
    a = assembly
    arrays = {name: jax.numpy.zeros(s.shape, s.dtype) for name, s in (a.shapes.params | a.shapes.rest).items()}
    engine = RolloutEngine(a.run.model, a.graph, a.shapes.params | a.shapes.rest, a.decided.dtype, None, a.run.rollout)
    lengths = lengths_of_rollout(a)
    real = engine(arrays).engine([lengths.input + lengths.output] * lengths.completions)
    assert real.settings.slots == planned_rollouts.engine.settings.slots == 64
    assert real.context == planned_rollouts.engine.context
    assert real.runner.cache_size == planned_rollouts.size
    assert bytes_of_caches(real.runner.caches) == planned_rollouts.memory["cache"]
    real.runner.refresh_weights(lambda: None)
    if planned_rollouts.engine.packed:
        # The trainer needs its weights, so packed ones are copies.
        assert (
            sum(p.nbytes for p in real.runner.forward.preparation.packer.panels.values()) == planned_rollouts.memory["packed weights"]
        )


def test_rows_of_an_update_are_those_of_its_completions():
    assembly, _ = parts(Target.described("h100-8"), "rollout.rows=16", "data.batch=128", "rollout.minibatches=2")
    update = update_assembly(assembly)
    lengths = lengths_of_rollout(assembly)
    # 64 completions of 128 tokens, each with its prompt of 128, or 8 prompts for all.
    tokens = 64 * 128 + (8 if lengths.shared else 64) * 128
    assert lengths.learned == 2 * tokens
    count = -(-tokens // (256 * 16))
    assert (update.run.accumulate, update.run.data.batch) == (count, 16 * count)


def test_what_does_not_fit_while_it_samples_is_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "grpo", "model=llama3.1-8b", "device=v5e-4", "compile=false", "--json"]) == 2
    out, message = capsys.readouterr()
    document = json.loads(out)
    assert not document["fits"]
    assert document["bound_by"].startswith("memory")
    assert "does not fit on v5e-4" in message


def test_rollouts_are_described(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "grpo", "model=qwen3-0.6b", "device=v5p-8", "compile=false"]) == 0
    out = capsys.readouterr().out
    assert "a rollout: 64 completions of 512 tokens to 8 prompts of 512, 64 at a time, weights shared" in out
    assert "in a step: rollouts" in out


def test_completions_that_leave_no_room_for_prompts_are_refused_at_once(capsys):
    assert main(["plan", "grpo", "model=qwen3-0.6b", "device=h100-8", "rollout.tokens=1e9"]) == 2
    assert "has no room for a prompt before an answer of 1000000000 tokens" in capsys.readouterr().err
