"""`argosy plan serve`: memory and time of an engine on devices that are not here, against engines that are, and counts by hand."""

import json
import math
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from argosy.cli import main
from argosy.core.errors import BadInput
from argosy.infer.engine.engine import Engine
from argosy.infer.forward.layers import LayerPrograms
from argosy.infer.forward.passes import TOGETHER
from argosy.infer.load import random_lm
from argosy.infer.settings import DraftModel, EngineSettings, LoraSettings, NGram
from argosy.jobs.plan import serving
from argosy.jobs.plan.serving import ServePlanSettings, plan_serving
from argosy.models.gemma import GemmaConfig
from argosy.models.llama import LlamaConfig
from argosy.models.parts.attention.cache import bytes_of_caches
from argosy.models.parts.stack import Unroll
from argosy.models.parts.weight import put, split
from argosy.observe.hlo.estimate import Prices
from argosy.ops.native import library
from argosy.parallel.target import Target
from argosy.run.plan import compiled_serving, measured
from argosy.run.plan.drafts import as_draft, drafted_step, tokens_per_step
from argosy.run.plan.serving import (
    expert_seconds,
    planned_steps,
    read_weights,
    served_model,
    serving_memory,
    serving_rates,
    step_parts,
    step_work,
)
from argosy.run.plan.serving_cpu import programs_bytes, serving_step
from argosy.run.settings.recipe_files import preset_config
from argosy.weights.build import tensor_shardings

PRICES = Prices(flops_per_s=1e12, bytes_per_s=1e11, ring_bytes_per_s=1e10)


def plan_document(name: str, **settings: Any) -> dict[str, Any]:
    engine = settings.pop("engine", {})
    return plan_serving(name, ServePlanSettings(compile=False, engine=EngineSettings(**engine), **settings), lambda _: None)


@pytest.mark.parametrize("family", [LlamaConfig, GemmaConfig])
@pytest.mark.parametrize("engine", [{}, {"pages": 512}, {"cache_dtype": "int8"}], ids=["plain", "pages", "int8"])
def test_memory_is_what_an_engine_allocates(family, engine):
    config = next(iter(family.examples().values()))
    settings = EngineSettings(slots=4, page=4, **engine)
    lm = random_lm(config, 0)
    real = Engine(lm.module, settings)
    model = served_model(config, Target.here(jax.devices()[:1]), settings, None, 1, {})
    memory, size = serving_memory(model, 1)
    assert memory["weights"] == sum(a.nbytes for a in jax.tree.leaves(split(lm.module)[1]))
    assert size == real.runner.cache_size
    assert memory["cache"] == bytes_of_caches(real.runner.caches)
    assert memory["sampler"] == sum(np.asarray(a).nbytes for a in jax.tree.leaves(real.runner.slots))


@pytest.mark.parametrize("alike", [True, False])
def test_memory_of_drafts_is_what_an_engine_allocates(alike):
    """The draft model's cache has the model's pages, and arrays of its own."""
    config = next(iter(LlamaConfig.examples().values()))
    smaller = config if alike else config.model_copy(update={"layers": 1})
    settings = EngineSettings(slots=4, page=4, speculative=DraftModel(model="draft", tokens=3))
    lm, draft = random_lm(config, 0), random_lm(smaller, 1)
    real = Engine(lm.module, settings, draft=draft.module)
    here = Target.here(jax.devices()[:1])
    model = served_model(config, here, settings, None, 1, {})
    described = served_model(smaller, here, EngineSettings(slots=4, page=4), None, 1, {})
    memory, size = serving_memory(replace(model, draft=as_draft(described, model)), 1)
    assert memory["draft model"] == sum(a.nbytes for a in jax.tree.leaves(split(draft.module)[1]))
    assert size == real.runner.cache_size
    assert memory["cache"] == bytes_of_caches((real.runner.caches, real.runner.speculation.drafter.caches))


def test_memory_of_adapters_is_what_an_engine_allocates():
    config = next(iter(LlamaConfig.examples().values()))
    settings = EngineSettings(slots=4, page=4, lora=LoraSettings(enabled=True, adapters=3, rank=5))
    lm = random_lm(config, 0)
    real = Engine(lm.module, settings)
    model = served_model(config, Target.here(jax.devices()[:1]), settings, None, 1, {})
    memory, _ = serving_memory(model, 1)
    assert memory["adapters"] == sum(a.nbytes for a in real.adapters.arrays.values()) > 0
    assert memory["weights"] == sum(a.nbytes for a in jax.tree.leaves(split(lm.module)[1]))
    # Every token is multiplied with the factors of all adapters, and a step reads them.
    plain = served_model(config, Target.here(jax.devices()[:1]), EngineSettings(slots=4, page=4), None, 1, {})
    sizes = sum(a.size for a in real.adapters.arrays.values())
    more = step_parts(model, 2, 0, 8, PRICES).products - step_parts(plain, 2, 0, 8, PRICES).products
    assert more == pytest.approx(2 * 2 * sizes / PRICES.flops_per_s)
    assert read_weights(model, 2) - read_weights(plain, 2) == memory["adapters"]


def test_drafts_cost_passes_and_give_tokens():
    """Three of four accepted: 1 + 3/4 + 9/16 tokens of a step with two drafts."""
    assert tokens_per_step(NGram(tokens=2), 0.75) == 2.3125
    assert (tokens_per_step(None, 0.75), tokens_per_step(NGram(tokens=4), 0)) == (1, 1)
    target, k = Target.described("h100-1"), 2
    plain = served_model(preset_config("llama3.2-1b"), target, EngineSettings(context=4096), None, 1, {})
    settings = EngineSettings(context=4096, speculative=DraftModel(model="draft", tokens=k))
    drafted = replace(served_model(preset_config("llama3.2-1b"), target, settings, None, 1, {}), draft=plain)
    step, verified = drafted_step(drafted, 8, 0, 1000, PRICES), step_work(plain, 8 * (1 + k), 0, 1000, PRICES)
    assert step.decodes == 8
    assert step.seconds == pytest.approx(verified.seconds + k * step_work(plain, 8, 0, 1000, PRICES).seconds)
    prompt = drafted_step(drafted, 0, 512, 0, PRICES).seconds
    assert prompt == pytest.approx(2 * step_work(plain, 0, 512, 0, PRICES).seconds)
    document = plan_document("llama3.2-1b", device="h100-1", acceptance=0.0, engine={"speculative": NGram(tokens=k), "context": 4096})
    rate = document["rates"][0]
    assert document["tokens_per_step"] == 1
    assert rate["output_tokens_per_s"] == pytest.approx(128 / (rate["time_to_first_token_s"] + 128 * rate["step_seconds"]))


def test_devices_that_share_a_model_have_the_shares_that_its_weights_get():
    config = preset_config("argosy-1m")
    model = served_model(config, Target.here(), EngineSettings(), None, 2, {})
    places = tensor_shardings(model.module, 2)
    for address, shape in model.shapes.items():
        assert model.bytes_of(address) == math.prod(places[address].shard_shape(shape.shape)) * shape.dtype.itemsize
    single, two = (plan_document("llama3.1-8b", device="v5p-8", tensor=n, engine={"context": 2048, "pages": 512}) for n in (1, 2))
    assert two["memory_bytes"]["weights"] == pytest.approx(single["memory_bytes"]["weights"] / 2, rel=1e-3)
    assert two["memory_bytes"]["cache"] == single["memory_bytes"]["cache"] / 2
    kinds = [(t["kind"], t["count"]) for t in two["rates"][0]["collectives"]]
    assert kinds == [("all-reduce", 64), ("all-gather", 1)]
    assert not single["rates"][0]["collectives"]


def test_weights_that_devices_do_not_share_are_said():
    """Three devices divide neither the 32 heads nor the features of Llama 3.1 8B, but its vocabulary."""
    config = preset_config("llama3.1-8b")
    document = plan_document("llama3.1-8b", device="h100-4", tensor=3)
    split = 2 * config.vocab * config.width
    assert document["memory_bytes"]["weights"] == pytest.approx(2 * (config.parameters() - split + split / 3), rel=1e-3)
    assert f"({1 - split / config.parameters():.0%}) on every device, as no rule splits them: layers.0.mlp." in document["replicated"]
    assert plan_document("llama3.1-8b", device="h100-4", tensor=4)["replicated"] == ""


def test_a_large_model_takes_what_arithmetic_says():
    document = plan_document("llama3.1-8b", device="h100-8", engine={"context": 8192}, price=2.0)
    # 32 layers with 8 heads of 128 for keys and values, in bfloat16.
    assert document["cache_bytes_per_token"] == 32 * 2 * 8 * 128 * 2
    assert document["memory_bytes"]["weights"] == 2 * 8_030_261_248
    # All weights but the embedding, which is looked up, at 0.85 of 3.35 TB/s; and 1,088 tokens of cache.
    read = 2 * (8_030_261_248 - 128_256 * 4096) + 1088 * 131_072
    rate = document["rates"][0]
    assert rate["sequences"] == 1
    assert rate["step_seconds"] == pytest.approx(read / (0.85 * 3.35e12), rel=0.01)
    assert rate["bound_by"].startswith("reading the weights")
    last = document["rates"][-1]
    assert last["sequences"] == document["cache_sequences"] == 32
    # One of 8 GPUs, in hours.
    assert document["cost_per_million_tokens"] == pytest.approx(2.0 / 3600 / last["output_tokens_per_s"] * 1e6)
    two = plan_document("llama3.1-8b", device="h100-8", engine={"context": 8192}, price=2.0, copies=2)
    assert two["rates"][-1]["output_tokens_per_s"] == pytest.approx(2 * last["output_tokens_per_s"])
    assert two["cost_per_million_tokens"] == pytest.approx(document["cost_per_million_tokens"])


def test_a_few_tokens_read_few_experts():
    config = preset_config("mixtral-8x7b")
    model = served_model(config, Target.described("h100-8"), EngineSettings(context=4096), None, 8, {})
    outside = read_weights(model, 0)
    experts = read_weights(model, 10_000) - outside
    # Two of eight for one token, and for two tokens those that either has.
    assert read_weights(model, 1) - outside == pytest.approx(experts / 4)
    assert read_weights(model, 2) - outside == pytest.approx(experts * (1 - 0.75**2))
    assert experts == pytest.approx(32 * 8 * 3 * 4096 * 14_336 * 2 / 8, rel=1e-3)
    # Reading bounds one token, products many; without experts there is no such time.
    assert expert_seconds(model, 1, PRICES) == pytest.approx(experts / 4 / PRICES.bytes_per_s)
    assert expert_seconds(model, 4096, PRICES) == pytest.approx(4096 * experts / 4 / PRICES.flops_per_s)
    dense = served_model(preset_config("llama3.1-8b"), Target.described("h100-8"), EngineSettings(), None, 1, {})
    assert expert_seconds(dense, 100, PRICES) == 0.0


def test_products_bound_long_steps_and_the_cache_long_sequences():
    model = served_model(preset_config("llama3.1-8b"), Target.described("h100-8"), EngineSettings(), None, 1, {})
    assert step_work(model, 1, 0, 100, PRICES).bound_by.startswith("reading the weights")
    assert step_work(model, 0, 2048, 0, PRICES).bound_by.startswith("matrix products")
    assert step_work(model, 64, 0, 100_000, PRICES).bound_by.startswith("reading the cache")
    prompt = step_work(model, 0, 2048, 0, PRICES)
    # Each of 2,048 tokens sees 1,024 on average: 4 FLOPs for each of them, head, and number of a head.
    assert prompt.by_kind["attention"] == pytest.approx(4 * 2048 * 1024 * 4096 * 32 / 1e12)
    assert prompt.by_kind["matrix products"] == pytest.approx(2048 * 2 * (8_030_261_248 - 2 * 128_256 * 4096) / 1e12, rel=0.01)


def test_rates_count_the_time_of_prompts():
    config = preset_config("llama3.1-8b")
    model = served_model(config, Target.described("h100-8"), EngineSettings(context=4096, budget=512), None, 1, {})
    _, size = serving_memory(model, 1)
    keys = planned_steps(model, size, 1300, 100)
    assert keys[:3] == [(0, 512, 0), (0, 512, 512), (0, 276, 1024)]
    steps = {key: step_work(model, *key, PRICES) for key in keys}
    rates = serving_rates(model, size, 1300, 100, steps)
    assert [rate.sequences for rate in rates] == [1, 8, 32]
    first = sum(steps[key].seconds for key in keys[:3])
    for rate in rates:
        assert rate.first_token_seconds == pytest.approx(first)
        assert rate.tokens_per_s == pytest.approx(rate.sequences * 100 / (rate.sequences * first + 100 * rate.step.seconds))
        assert rate.token_seconds == pytest.approx(rate.sequences / rate.tokens_per_s)


def test_weights_in_few_bits_take_less_and_are_read_faster():
    plain, few = (plan_document("llama3.1-8b", device="v5e-8", quantization=q, engine={"context": 2048}) for q in (None, "w4"))
    assert few["memory_bytes"]["weights"] < 0.4 * plain["memory_bytes"]["weights"]
    assert few["rates"][0]["step_seconds"] < 0.4 * plain["rates"][0]["step_seconds"]


def test_what_does_not_fit_is_refused_with_settings_that_do(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "serve", "llama3.1-8b", "device=v5e-8", "compile=false", "--json"]) == 2
    out, stderr = capsys.readouterr()
    document = json.loads(out)
    assert not document["fits"]
    assert "does not fit on v5e-8" in stderr
    assert "tensor=2" in stderr.partition("hint:")[2]
    for candidate in document["nearest"]:
        words = dict(word.split("=") for word in candidate["settings"])
        engine = {"context": int(words.pop("engine.context"))} if "engine.context" in words else {}
        other = plan_document(
            "llama3.1-8b", device="v5e-8", engine=engine, **{k: int(v) if v.isdecimal() else v for k, v in words.items()}
        )
        assert other["fits"], candidate
        assert other["memory_bytes"]["total"] == candidate["memory_bytes"]


@pytest.mark.parametrize(
    "words, problem",
    [
        ([], "one model"),
        (["argosy-1m", "llama3.1-8b"], "one model"),
        (["minilm-l6"], "generates no text"),
        (["wan2.1-t2v-1.3b", "engine.context=512"], "generates no text"),
        (["nowhere"], "no preset, file or folder"),
        (["hf:me/mine"], "would be downloaded"),
        (["argosy-1m", "engine.speculative=mtp"], "engine.speculative=mtp"),
        (["argosy-1m", "acceptance=0.5"], "there are no drafts"),
        (["argosy-1m", "engine.speculative=ngram", "acceptance=1"], "acceptance"),
        (["argosy-1m", "engine.speculative=draft_model", "engine.speculative.model=llama3.2-1b"], "128256 tokens, the model"),
        (["argosy-1m", "engine.lora.enabled=true", "engine.lora.where=nothing"], "matches `nothing`"),
        (["llama3.1-8b", "device=v5e-8", "tensor=16"], "v5e-8 has 8"),
        (["llama3.1-8b", "device=v5e-8", "tensor=4", "copies=4"], "take 16 devices"),
        (["argosy-1m", "quantization=w3"], "w3"),
        (["argosy-1m", "engine.pages=1"], "holds no sequence"),
        (["argosy-1m", "data.batch=8"], "data.batch"),
        (["argosy-1m", "input_len=100000"], "argosy-1m reads"),
        (["argosy-1m", "engine.context=100000"], "made for at most"),
        (["argosy-1m", "dtype=int8"], "do not compute in dtype `int8`"),
    ],
)
def test_mistakes_are_answered(words, problem, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "serve", *words]) == 2
    assert problem in capsys.readouterr().err


def test_a_step_that_the_compiler_refuses_needs_more_than_there_is(monkeypatch: pytest.MonkeyPatch):
    """The compiler names the bytes of the temporaries, or none."""
    monkeypatch.setattr(Target, "missing_compiler", lambda self: None)
    for needed in (0, 50 << 30):
        monkeypatch.setattr(serving, "answer_of_compiler", lambda *_, n=needed: {"fits": False, "needed": n, "steps": []})
        settings = ServePlanSettings(device="v5e-1", engine=EngineSettings(context=2048, pages=256))
        document = plan_serving("llama3.2-1b", settings, lambda _: None)
        assert (document["fits"], document["verdict_by"], document["rates"]) == (False, "compiler", [])
        assert document["memory_bytes"]["temporaries"] >= max(needed, 1)


def test_a_server_on_this_machine_is_planned(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "serve", "argosy-1m", "input_len=32", "output_len=16"]) == 0
    out = capsys.readouterr().out
    assert "argosy-1m on this: 1 copy on 1 device" in out
    assert "memory of this machine" in out
    assert "small instructions" in out
    assert "process" in out
    assert "lower bound" not in out


def test_steps_are_compiled_for_sizes_that_the_engine_has():
    config = preset_config("llama3.1-8b")
    model = served_model(config, Target.described("v5e-8"), EngineSettings(context=4096, slots=12), None, 8, {})
    _, size = serving_memory(model, 1)
    sizes = {compiled_serving.step_sizes(model, key) for key in planned_steps(model, size, 700, 100)}
    assert {(s.decodes, s.rows) for s in sizes} == {(4, 0), (8, 0), (16, 0), (0, 16), (0, 8)}


@pytest.mark.tpu
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_compiled_step_copies_no_layer_of_the_cache(tensor):
    """Layers that run in a loop read their pages of the whole stack in place. A slice would be copied for the kernel that reads it."""
    config = preset_config("llama3.1-8b").model_copy(update={"layers": 4, "vocab": 512})
    target = Target.described("v5e-8").compiled()
    model = served_model(config, target, EngineSettings(context=4096, pages=4096), None, tensor, {})
    _, size = serving_memory(model, 1)
    key = (32, 0, 1000)
    program = compiled_serving.lowered_step(model, size, key).compile()
    memory, cache = program.memory_analysis(), model.cache_bytes(size)
    assert memory.alias_size_in_bytes >= cache
    # A layer's pages are a fourth of the cache.
    assert memory.temp_size_in_bytes < cache / 16
    assert compiled_serving.PAGED in program.as_text()
    answer = compiled_serving.compiled_serving(model, size, [key], PRICES)
    assert answer.fits
    assert answer.needed > cache
    assert not answer.uncounted
    assert not answer.unknown_loops
    kinds = {t.kind for t in answer.steps[key].traffic}
    assert kinds == (set() if tensor == 1 else {"all-reduce", "all-gather"})


@pytest.mark.tpu
def test_the_compiler_is_asked_where_it_is_installed(capsys: pytest.CaptureFixture[str]):
    words = ["argosy-1m", "device=v5e-1", "input_len=32", "output_len=16", "engine.slots=2", "--json"]
    assert main(["plan", "serve", *words]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["verdict_by"], document["missing_compiler"]) == ("compiler", None)
    assert [entry["sequences"] for entry in document["rates"]] == [1, 2]
    assert all(entry["step_seconds"] > 0 for entry in document["rates"])
    assert main(["plan", "serve", *words, "compile=false"]) == 0
    other = json.loads(capsys.readouterr().out)
    assert other["verdict_by"] == "model"
    same = ("weights", "cache", "sampler")
    assert [document["memory_bytes"][kind] for kind in same] == [other["memory_bytes"][kind] for kind in same]


@pytest.mark.skipif(bool(library.load()), reason="no compiled kernels here")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_packed_weights_take_what_an_engine_packs(dtype):
    """An engine alone with its model packs weights in place: those that a file has in bfloat16 in half the bytes."""
    config = preset_config("argosy-1m")
    lm = random_lm(config, 0)
    device = jax.devices()[0]
    rounded = {a: jax.device_put(w.astype(dtype).astype("float32"), device) for a, w in split(lm.module)[1].items()}
    put(lm.module, rounded)
    real = Engine(lm.module, EngineSettings(slots=4), exclusive=True)
    real.runner.refresh_weights(lambda: None)
    model = served_model(config, Target.here([device]), EngineSettings(slots=4), None, 1, {}, lambda _: dtype)
    assert model.packed
    assert serving_memory(model, 1)[0]["weights"] == sum(w.nbytes for w in real.runner.weights().values())
    assert model.bytes_of("embed.w") == (2 if dtype == "bfloat16" else 4) * config.vocab * config.width
    assert programs_bytes(model) > programs_bytes(replace(model, settings=EngineSettings(slots=1))) > 0


def test_small_instructions_bound_little_models_on_a_cpu():
    model = served_model(preset_config("argosy-1m"), Target.here(), EngineSettings(), None, 1, {}, lambda _: "bfloat16")
    prices = replace(PRICES, read_bytes_per_s=2e10)
    single, many = (serving_step(model, n, 0, 100, prices) for n in (1, 32))
    assert single.bound_by.startswith("small instructions")
    assert single.seconds < many.seconds < 32 * single.seconds
    large = served_model(preset_config("llama3.1-8b"), Target.here(), EngineSettings(), None, 1, {}, lambda _: "bfloat16")
    step = serving_step(large, 1, 0, 100, prices)
    # All weights but the embedding, two bytes each where they are packed, at the price of reads.
    each = 2 if large.packed else 4
    assert step.by_kind["reading the weights"] == pytest.approx(each * (8_030_261_248 - 128_256 * 4096) / 2e10, rel=0.01)
    # Elsewhere the step is the other model's.
    described = served_model(preset_config("llama3.1-8b"), Target.described("h100-8"), EngineSettings(), None, 1, {})
    assert serving_step(described, 1, 0, 100, PRICES) == step_work(described, 1, 0, 100, PRICES)


def test_speeds_of_this_machine_are_the_best_ever_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "_file", lambda: tmp_path / "speed.json")
    speeds = iter([measured.Speeds(1e11, 5e9, 3e10), measured.Speeds(2e11, 4e9, 2e10)])
    monkeypatch.setattr(measured, "_measured", lambda: next(speeds))
    prices_here = measured.prices_here.__wrapped__
    assert prices_here("cpu").read_bytes_per_s == 3e10
    again = prices_here("cpu")
    assert (again.peak_flops_per_s, again.bytes_per_s, again.read_bytes_per_s) == (2e11, 5e9, 3e10)
    assert prices_here("cpu", again=False) == again
    # What an earlier version kept has no price of reads.
    keys = json.loads((tmp_path / "speed.json").read_text())
    (tmp_path / "speed.json").write_text(json.dumps({key: {"flops_per_s": 1e11, "bytes_per_s": 1e9} for key in keys}))
    assert measured._stored() is None


def test_a_folder_needs_no_weights(tmp_path):
    """Only config.json: the type of the weights is what it says."""
    config = preset_config("llama3.2-1b")
    hub_config = config.to_hub() | {"dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(hub_config))
    folder, preset = (plan_document(str(name), device="v5e-1", engine={"context": 2048}) for name in (tmp_path, "llama3.2-1b"))
    assert folder["memory_bytes"] == preset["memory_bytes"]
    (tmp_path / "config.json").write_text(json.dumps(hub_config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(BadInput, match="few bits"):
        plan_document(str(tmp_path), device="v5e-1")


@pytest.mark.slow
def test_published_weights_in_few_bits_are_planned_in_them():
    """OpenAI's model card has 12.8 GiB for the checkpoint of gpt-oss 20B, and DeepSeek V3's 671B parameters are in FP8."""
    small = plan_document("gpt-oss-20b", device="h100-1", engine={"context": 2048})
    assert small["memory_bytes"]["weights"] == pytest.approx(12.8 * 2**30, rel=0.02)
    assert small["published_in"] == "mxfp4"
    plain = plan_document("gpt-oss-20b", device="h100-1", quantization="w8", engine={"context": 2048})
    assert (plain["published_in"], plain["memory_bytes"]["weights"] > small["memory_bytes"]["weights"]) == (None, True)


@pytest.mark.parametrize(
    "words, setting",
    [
        (["--tensor-parallel-size", "2"], {"tensor": 2}),
        (["--max-model-len", "4096"], {"context": 4096}),
        (["--quantization", "w8"], {"quantization": "w8"}),
    ],
)
def test_flags_of_vllm_are_settings(words, setting, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "serve", "llama3.2-1b", "device=v5p-8", "compile=false", "--json", *words]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {name: document[name] for name in setting} == setting


@pytest.mark.parametrize(
    "word, problem",
    [
        ("--gpu-memory-utilization=0.9", "engine.memory=BYTES"),
        ("max_num_seqs=8", "`engine.slots`"),
        ("kv_cache_dtype=fp8", "`engine.cache_dtype`"),
        ("gpu_memory_utilization=0.9", "engine.memory=BYTES"),
        ("--port=80", "no such option"),
        ("host=1.2.3.4", "unknown setting `host`"),
    ],
)
def test_what_vllm_calls_otherwise_is_answered(word, problem, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "serve", "llama3.1-8b", "device=v5e-8", word]) == 2
    err = capsys.readouterr().err
    assert problem in err
    assert "did you mean `host`" not in err


def test_layers_that_are_alike_share_a_program():
    """Of 12 equal layers the first run of four is compiled; of five local ones and a global one, one each."""
    for preset, changes, compiled in (
        ("llama3.2-1b", {"layers": 12}, [0, 1, 2, 3]),
        ("gemma3-1b", {"layers": 6}, [0, 5]),
    ):
        config = preset_config(preset).model_copy(update=changes)
        assert sorted(LayerPrograms(config.build(Unroll()), TOGETHER).compiled_layers) == compiled
