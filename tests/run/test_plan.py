"""`argosy plan`: memory and time of a step on devices that are not here, against hand counts, the compiler, and what is allocated."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import pytest

import argosy
from argosy.cli import main
from argosy.core.errors import BadInput
from argosy.infer.load import random_lm
from argosy.jobs.plan.training import PlanSettings, figures_from, plan, plan_reading
from argosy.observe.hardware import hardware
from argosy.observe.hlo.estimate import Prices, price_program
from argosy.observe.hlo.module import HloModule
from argosy.run.assembly.assemble import assemble
from argosy.run.assembly.assembly import Assembly
from argosy.run.assembly.decided import Decided
from argosy.run.memory import compiled_need
from argosy.run.plan.compiled import compiled_figures, out_of_memory
from argosy.run.plan.figures import KINDS
from argosy.run.plan.nearest import changed_run
from argosy.run.settings.compose import compose
from argosy.run.settings.recipe_files import preset_config
from argosy.run.settings.run import Run

LARGE = ("model=llama2-70b",)


def plan_document(recipe: str, *words: str, **settings: Any) -> dict[str, Any]:
    return plan(recipe, words, PlanSettings(**settings), lambda _: None)


def test_a_large_model_fits_where_it_should_and_the_answer_says_why():
    document = plan_document(
        "pretrain", *LARGE, "data.sequence=4096", "data.batch=128", "execution.remat=full", device="v5p-128", compile=False
    )
    parameters = 68_976_648_192
    memory = document["memory_bytes"]
    assert (document["fits"], document["verdict_by"], document["parameters"]) == (True, "model", parameters)
    # Weights and two moments in float32, split over 64 devices but for the norms.
    assert memory["parameters"] == pytest.approx(4 * parameters / 64, rel=1e-3)
    assert memory["optimizer"] == pytest.approx(8 * parameters / 64, rel=1e-3)
    # Inputs of 80 layers and the outputs of their attention, two rows of 4096 tokens a device, and the rest.
    layers = 2 * 80 * 2 * 4096 * 8192 * 2
    assert layers < memory["activations"] < 1.2 * layers
    # libtpu allocates 54.9 GB for this step.
    assert memory["total"] == pytest.approx(54.9e9, rel=0.15)
    assert document["flops_per_step"] == pytest.approx(6 * parameters * 128 * 4096, rel=0.1)
    assert 0.3 < document["mfu"] < 0.75
    # Over several axes of a 3-D torus XLA sums gradients whole.
    assert {(entry["kind"], entry["axis"]) for entry in document["collectives"]} == {("all-gather", "fsdp"), ("all-reduce", "fsdp")}
    assert set(memory) == {*KINDS, "total"}
    assert document["tokens_per_step"] == 128 * 4096


def test_what_does_not_fit_is_refused_with_settings_that_do(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "pretrain", *LARGE, "device=v5e-16", "--json"]) == 2
    out, message = capsys.readouterr()
    document = json.loads(out)
    assert document["fits"] is False
    assert document["memory_bytes"]["total"] > 4 * document["memory_limit_bytes"]
    assert "does not fit on v5e-16" in message
    assert "largest: layers.block.mlp" in message
    words = document["nearest"][0]["settings"]
    assert " ".join(words) in message
    device = next(word.partition("=")[2] for word in words if word.startswith("device="))
    others = [word for word in words if not word.startswith("device=")]
    assert plan_document("pretrain", *LARGE, *others, device=device, compile=False)["fits"]


@pytest.mark.slow
def test_settings_that_need_less_come_before_more_devices():
    words = ("model=llama2-7b", "data.sequence=4096", "data.batch=64")
    document = plan_document("pretrain", *words, device="v5e-32", compile=False)
    assert not document["fits"]
    first = document["nearest"][0]["settings"]
    assert "execution.remat=full" in first
    assert not any(word.startswith("device=") for word in first)


@pytest.mark.slow
def test_adapters_that_do_not_fit_have_hints_of_their_own():
    """A base of 8 B parameters in bfloat16 takes all of a v5e's memory."""
    words = ("model=llama3.1-8b", "adapter=lora", "adapter.rank=4", "data.sequence=1024")
    document = plan_document("sft", *words, device="v5e-1", compile=False)
    assert not document["fits"]
    (first, *_) = (candidate["settings"] for candidate in document["nearest"])
    assert first == ["adapter=qlora", "execution.remat=full"]
    assert plan_document("sft", *words, *first, device="v5e-1", compile=False)["fits"]


@pytest.mark.slow
def test_ranks_that_do_not_fit_are_lowered():
    words = ("model=llama3.2-1b", "adapter=dora", "adapter.rank=2048", "data.sequence=1024", "execution.remat=full", "data.batch=1")
    document = plan_document("sft", *words, device="v5e-1", compile=False)
    assert not document["fits"]
    assert document["nearest"][0]["settings"] == ["adapter.rank=128"]
    keys = [[word.partition("=")[0] for word in candidate["settings"]] for candidate in document["nearest"]]
    assert len(keys) == len({*map(tuple, keys)})


def test_a_wrong_device_and_a_wrong_setting_are_mistakes(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "tiny", "device=v6q-4"]) == 2
    assert "device=v6q-4" in capsys.readouterr().err
    assert main(["plan", "tiny", "device=v5e-4", "data.batch=6"]) == 2
    assert "data.batch = 6 does not divide over 4 devices" in capsys.readouterr().err
    assert main(["plan", "pretrain", "model=llama2-700b", "device=v5e-4"]) == 2


def test_a_price_gives_a_cost():
    document = plan_document("tiny", "steps=1000", device="v5e-8", compile=False, price=1.2)
    hours = 1000 * document["step_seconds"] / 3600
    assert document["cost"] == pytest.approx(hours * 8 * 1.2)
    assert document["days"] == pytest.approx(hours / 24)


def test_the_compiler_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("argosy.parallel.target.find_spec", lambda name: None)
    document = plan_document("tiny", device="v5e-4")
    assert (document["missing_compiler"], document["verdict_by"]) == ("libtpu", "model")
    assert plan_document("tiny", device="h100-8")["missing_compiler"] == "jax-cuda12-plugin"


@pytest.mark.slow
def test_the_plan_for_this_machine_is_what_a_run_is_told(tmp_path: Path):
    words = ["data.batch=8", "data.source=synthetic"]
    document = plan_document("tiny", *words)
    run = compose(Run, "tiny", [*words, f"dir={tmp_path}", "eval.batches=0"]).value
    assembly = assemble(run, Decided.here(run))
    try:
        compiled = compiled_need(assembly, assembly.compile()).document()
    finally:
        assembly.close()
    planned_bytes = {kind: size for kind, size in document["memory_bytes"].items() if kind not in ("process", "total")}
    assert planned_bytes == {kind: size for kind, size in compiled.items() if kind not in ("process", "total")}
    assert document["verdict_by"] == "compiler"
    assert document["step_seconds"] > 0


CYCLES = 'backend_config={"window_config":{"estimated_cycles":"NUMBER"}}'
SCHEDULE = """HloModule m, is_scheduled=true

ENTRY %main (x: bf16[1024]) -> bf16[4096] {
  %x = bf16[1024]{0} parameter(0)
  %before = bf16[1024]{0} fusion(%x), kind=kLoop, calls=%f, CYCLES1000
  %start = (bf16[1024]{0}, bf16[4096]{0}) all-gather-start(%before), replica_groups=[1,4]<=[4], dimensions={0}
  %beside = bf16[1024]{0} fusion(%x), kind=kLoop, calls=%f, CYCLES300
  %done = bf16[4096]{0} all-gather-done(%start)
  ROOT %sum = bf16[4096]{0} all-reduce(%done), replica_groups=[1,4]<=[4], to_apply=%add
}
"""


def test_collectives_cost_what_no_work_hides():
    text = SCHEDULE
    for number in (1000, 300):
        text = text.replace(f"CYCLES{number}", CYCLES.replace("NUMBER", str(number)))
    prices = Prices(flops_per_s=1, bytes_per_s=1, ring_bytes_per_s=8192.0, clock_hz=1000.0)
    price = price_program(HloModule.read(text), prices, 4)
    # 8192 bytes, of which a device receives three quarters; then the sum, twice that.
    assert price.compute_seconds == pytest.approx(1.3)
    assert price.communication_seconds == pytest.approx(0.75 + 1.5)
    assert price.exposed_seconds == pytest.approx(0.45 + 1.5)
    assert price.seconds == pytest.approx(1.3 + 1.95)


GROUPED_ROWS = """HloModule m, is_scheduled=true

ENTRY %main (rows: bf16[512,64]) -> bf16[512,128] {
  %rows = bf16[512,64]{1,0} parameter(0)
  %experts = bf16[8,64,128]{2,1,0} parameter(1)
  ROOT %gmm.2 = bf16[512,128]{1,0} custom-call(%rows, %experts), custom_call_target="tpu_custom_call", metadata={op_name="SCOPE"}
}
"""


def test_grouped_products_skip_places_that_are_empty():
    prices = Prices(flops_per_s=1, bytes_per_s=1, ring_bytes_per_s=1, clock_hz=1, peak_flops_per_s=2 * 512 * 64 * 128)
    scopes = {"jit(f)/jvp(jit(gmm))/pallas_call": 1.0, "jit(f)/transpose(jvp(filled_percent_80))/jit(gmm)/pallas_call": 0.8}
    for scope, share in scopes.items():
        price = price_program(HloModule.read(GROUPED_ROWS.replace("SCOPE", scope)), prices)
        assert price.compute_seconds == pytest.approx(share / 0.8)


def test_the_message_of_a_compiler_is_read():
    text = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (93.71G) exceeds HBM (15.75G)."
    assert out_of_memory(RuntimeError(text)) == int(93.71 * 2**30)
    assert out_of_memory(RuntimeError("RESOURCE_EXHAUSTED: something else")) == 0
    assert out_of_memory(RuntimeError("INVALID_ARGUMENT: no")) is None


SMALL = ("model=llama3.2-1b", "model.layers=2", "model.vocab=4096", "data.sequence=1024", "data.batch=8")


@pytest.mark.tpu
def test_the_compiler_answers_for_a_tpu_and_the_model_is_near(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """In a process of its own; the second answer is read from the cache."""
    if not find_spec("libtpu"):
        pytest.skip("libtpu is not installed: no TPU can be described")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    document = plan_document("pretrain", *SMALL, device="v5e-4")
    assert (document["fits"], document["verdict_by"]) == (True, "compiler")
    assert document["memory_bytes_by_model"]["total"] == pytest.approx(document["memory_bytes"]["total"], rel=0.35)
    assert document["step_seconds_by_model"] == pytest.approx(document["step_seconds"], rel=0.6)
    kinds = {entry["kind"] for entry in document["collectives"] if entry["axis"] == "fsdp"}
    assert "all-gather" in kinds
    cached_files = list(tmp_path.rglob("plans/*.json"))
    assert len(cached_files) == 1
    assert figures_from(json.loads(cached_files[0].read_text())).step_seconds == document["step_seconds"]
    monkeypatch.setattr("argosy.run.plan.compiled.compiled_figures", lambda *_: pytest.fail("compiled again"))
    assert plan_document("pretrain", *SMALL, device="v5e-4")["step_seconds"] == document["step_seconds"]
    assert len(list(tmp_path.rglob("plans/*.json"))) == 1


@pytest.mark.tpu
def test_what_a_compiler_refuses_does_not_fit(monkeypatch: pytest.MonkeyPatch):
    from helpers import described_tpus

    from argosy.parallel.target import Target
    from argosy.run.plan.speed import prices_of

    described_tpus(monkeypatch, "v5e:2x2")
    target = Target.described("v5e-4").compiled()
    run = compose(Run, "pretrain", ["model=llama2-7b", "data.source=synthetic", "data.batch=4"]).value
    assembly = assemble(run, Decided.here(run, target), target=target, reads=False)
    assert target.chip is not None
    figures = compiled_figures(assembly, prices_of(target.chip), 0.25)
    assert (figures.fits, figures.step_seconds) == (False, None)
    assert figures.total > target.chip.memory_bytes


@pytest.mark.slow
def test_recipes_with_a_preset_are_planned_for_a_host_and_a_pod():
    for recipe, device in (("pretrain", "v5p-64"), ("sft", "v5p-64"), ("dpo", "h200-8")):
        document = plan_document(recipe, "model=llama3.1-8b", device=device, compile=False)
        assert document["parameters"] == 8_030_261_248, recipe
        assert document["step_seconds"] > 0
    # What does not combine is said as it would be by a run.
    with pytest.raises(BadInput, match="several processes and a reference"):
        plan_document("dpo", "model=llama3.1-8b", device="v5p-64", compile=False)


def test_a_step_that_its_compiler_refuses_is_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Compilers of TPUs raise it inside of `compile`; as a failure, `argosy launch` would start the run again."""
    text = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (93.71G) exceeds HBM (15.75G)."

    def compile_(self: Assembly) -> Any:
        raise jax.errors.JaxRuntimeError(text)

    monkeypatch.setattr(Assembly, "compile", compile_)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["train", "tiny", "mesh.fsdp=1", "mesh.data=-1", f"dir={tmp_path / 'run'}", "eval.batches=0"]) == 2
    err = capsys.readouterr().err
    assert "does not fit on a device (cpu)" in err
    assert "the compiler asks for 93.7 GiB" in err
    assert "largest of the state: embed" in err
    assert "execution.remat=full" in err.partition("hint:")[2]
    assert "plan        about" in err
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_words_change_settings_and_nothing_else():
    run = compose(Run, "tiny", ["data.batch=16"]).value
    other = changed_run(run, ["data.batch=4", "execution.remat=full", "mesh.fsdp=-1"])
    assert (other.data.batch, other.execution.remat, other.mesh.fsdp) == (4, "full", -1)
    expected = compose(Run, "tiny", ["data.batch=4", "execution.remat=full", "mesh.fsdp=-1"]).value
    assert other.model_dump() == expected.model_dump()
    assert run.data.batch == 16


@pytest.mark.slow
def test_a_search_ranks_what_fits_and_writes_the_best(tmp_path: Path):
    out = tmp_path / "best.yml"
    words = ("model=llama3.2-1b", "data.sequence=1024", "data.batch=64")
    document = plan_document("pretrain", *words, device="v5e-8", compile=False, search=True, out=str(out))
    speeds = [candidate["tokens_per_s"] for candidate in document["ranking"]]
    assert speeds == sorted(speeds, reverse=True)
    assert len({tuple(candidate["settings"]) for candidate in document["ranking"]}) == len(speeds) > 3
    assert all(candidate["memory_bytes"] < document["memory_limit_bytes"] for candidate in document["ranking"])
    assert document["tokens_per_s"] == pytest.approx(speeds[0])
    # A recipe like any other, with the user's model and its settings.
    best = plan_document(str(out), *words, device="v5e-8", compile=False)
    assert best["step_seconds"] == pytest.approx(document["step_seconds"])
    assert best["mesh"] == document["mesh"]
    with pytest.raises(BadInput, match="exists"):
        plan_document("pretrain", *words, device="v5e-8", compile=False, search=True, out=str(out))


def test_a_preset_under_an_adapter_stands_for_its_weights():
    assert plan_reading("sft", ["model=llama3.2-1b", "adapter=lora"]).value.init.weights == "llama3.2-1b"
    assert plan_reading("sft", ["model=llama3.2-1b"]).value.init.weights is None
    assert plan_reading("sft", ["model=llama3.2-1b", "adapter=lora", "init.weights=mine"]).value.init.weights == "mine"


@pytest.mark.slow
def test_adapters_and_frozen_models_are_planned():
    whole, adapted = (
        plan_document("sft", "model=llama3.2-1b", *more, device="h100-8", compile=False) for more in ((), ("adapter=lora",))
    )
    assert adapted["memory_bytes"]["optimizer"] < 0.05 * whole["memory_bytes"]["optimizer"]
    # Frozen weights are bfloat16.
    assert adapted["memory_bytes"]["parameters"] == pytest.approx(whole["memory_bytes"]["parameters"] / 2, rel=0.1)
    assert adapted["fits"]
    assert adapted["collectives"][1]["bytes"] < 0.05 * whole["collectives"][1]["bytes"]


@pytest.mark.parametrize("recipe", ["diffusion", "ranker", "two-tower"])
def test_models_that_read_no_tokens_are_planned(recipe):
    answer = plan(recipe, [], PlanSettings(device="v5p-8", compile=False), lambda _: None)
    assert answer["fits"]
    assert answer["tokens_per_step"] >= 4
    assert answer["unit"] == ("images" if recipe == "diffusion" else "rows")
    assert answer["step_seconds"] > 0


@pytest.mark.parametrize("model, device", [
    ("flux1-dev", "v5p-128"),
    pytest.param("sdxl", "h100-8", marks=pytest.mark.slow),
    pytest.param("wan2.1-t2v-14b", "v6e-64", marks=pytest.mark.slow),
])  # fmt: skip
def test_denoisers_are_planned_by_name_without_their_encoders(model: str, device: str):
    words = [f"model={model}", "objective.condition=text", "sample.every=none", "data.batch=64"]
    settings = PlanSettings(device=device, compile=False)
    document, half = (plan("diffusion", [*words, f"data.image.size={size}"], settings, lambda text: None) for size in (64, 32))
    assert document["parameters"] == preset_config(model).parameters()
    # A quarter of the image's tokens; the text's are as many as before.
    assert 1.5 < document["flops_per_step"] / half["flops_per_step"] < 5
    assert document["memory_bytes"]["activations"] > 1.5 * half["memory_bytes"]["activations"]
    assert document["memory_bytes"]["parameters"] == half["memory_bytes"]["parameters"]


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["lora", "qlora"])
def test_memory_under_adapters_is_what_the_run_allocates(adapter, tmp_path):
    """The header of a run has what XLA allocates for its compiled step beside the arrays that are there."""
    config = preset_config("argosy-1m").model_copy(update={"width": 256, "ffn": 512})
    random_lm(config, 0).save(tmp_path / "model", format="hub")
    words = [f"model={tmp_path}/model", f"adapter={adapter}", "data.source=synthetic", "data.sequence=64", "data.batch=8"]
    planned_run = plan("sft", words, PlanSettings(), lambda _: None)
    assert planned_run["verdict_by"] == "compiler"
    run = argosy.fit("sft", *words, f"dir={tmp_path}/run", "steps=1", "eval.batches=0", "init.tokenizer_mismatch=allow")
    lines = (Path(run.dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    allocated = next(json.loads(line)["header"]["memory"] for line in lines if "header" in line)
    for kind in ("parameters", "gradients", "optimizer", "activations"):
        assert planned_run["memory_bytes"][kind] == pytest.approx(allocated[kind], rel=0.05), kind
    weights = planned_run["memory_bytes"]["parameters"] / config.parameters()
    assert weights > 3 if adapter == "lora" else weights < 3


def test_gpus_are_part_of_a_host_or_whole_hosts():
    assert [hardware(name).hosts for name in ("h100-3", "h100-8", "h200-16")] == [1, 1, 2]
    with pytest.raises(BadInput, match="whole number of hosts") as caught:
        hardware("h100-12")
    assert "h100-16" in str(caught.value.hint) or "h100-8" in str(caught.value.hint)
