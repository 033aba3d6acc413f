"""`argosy quantize ... search=`: what is measured is what written models do, budgets are kept, and mistakes come before work."""

import itertools
import json
from typing import Any

import numpy as np
import pytest
from helpers import stories_model, stories_text
from laws.families import CASES, noisy_model

import argosy
from argosy.adapt.calibration.data import CalibrationData
from argosy.adapt.calibration.layers import LayerRunner
from argosy.adapt.quant import Scheme
from argosy.adapt.rules import preset_rules, read_rules, schemes_of
from argosy.adapt.search.budget import PresetCost, convex_hull, within_budget
from argosy.adapt.search.patterns import mixed_rules
from argosy.adapt.search.sensitivity import SensitivityMeter
from argosy.checkpoint.open import open_model
from argosy.cli import main
from argosy.cli.verbs.quantize import Quantize, check_search
from argosy.core.errors import BadInput, Unsupported
from argosy.data.settings import DataSettings
from argosy.infer.lm import LM
from argosy.infer.load import load_lm
from argosy.jobs.quantize import quantize
from argosy.jobs.quantize_search import search_recipe
from argosy.models.parts.stack import Unroll

SYNTHETIC = DataSettings(source="synthetic", sequence=16)


def save_case(name, folder):
    config = CASES[name]
    LM(config, noisy_model(config, Unroll()), None).save(folder, format="argosy")
    return config


def log_softmax(logits):
    logits = logits.astype(np.float64)
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


def divergence(exact, other):
    p, q = log_softmax(exact), log_softmax(other)
    return float((np.exp(p) * (p - q)).sum(-1).mean())


# ---------------------------------------------------------------- the choice


def random_groups(rng):
    """Costs without order: a dearer preset may be worse."""
    bits = rng.integers(1, 9, (5, 3))
    kl = rng.exponential(1.0, (5, 3)) / bits
    return [{f"p{k}": PresetCost(int(b[k]) * 8, float(d[k])) for k in range(3)} for b, d in zip(bits, kl, strict=True)]


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_within_one_step_of_the_best(seed):
    rng = np.random.default_rng(seed)
    groups = random_groups(rng)
    least, most = (sum(pick(cost.bits for cost in costs.values()) for costs in groups) for pick in (min, max))
    for budget in rng.integers(least, most + 1, 5):
        choices = within_budget(groups, int(budget))
        bits, kl = (sum(values) for values in zip(*(costs[name] for costs, name in zip(groups, choices, strict=True)), strict=True))
        assert bits <= budget
        every = ([costs[name] for costs, name in zip(groups, names, strict=True)] for names in itertools.product(*groups))
        best = min(sum(cost.divergence for cost in some) for some in every if sum(cost.bits for cost in some) <= budget)
        steps = [
            costs[a].divergence - costs[b].divergence for costs in groups for a, b in itertools.pairwise(convex_hull(costs))
        ]
        assert best - 1e-12 <= kl <= best + max(steps, default=0)


def test_a_small_gain_hides_no_better_one_behind_it():
    costs = {"a": PresetCost(4, 1.0), "b": PresetCost(5, 0.99), "c": PresetCost(6, 0.1), "worse": PresetCost(7, 0.2)}
    assert convex_hull(costs) == ["a", "c"]
    assert within_budget([costs], 6) == ["c"]
    assert within_budget([costs], 5) == ["a"]


# ---------------------------------------------------------------- rules


@pytest.mark.parametrize("seed", range(4))
def test_rules_say_the_preset_of_each_matrix(seed):
    rng = np.random.default_rng(seed)
    model = CASES["deepseek-3.2"].build(Unroll())
    names = schemes_of(model, preset_rules("w8"))
    presets = {name: str(rng.choice(["w8", "w4a8", "nvfp4"])) for name in names}
    # Modules that agree in all layers.
    presets |= {name: "mxfp4" for name in names if name.endswith(".attn.o")}
    rules = mixed_rules(presets)
    assert schemes_of(model, rules) == {name: preset_rules(preset)[0].scheme() for name, preset in presets.items()}


def test_modules_that_agree_share_a_rule():
    modules = {"attn.q": "w8", "attn.o": "w8", "mlp.up": "w4", "mlp.down": "w4", "mlp.gate": "w4"}
    presets = {f"layers.{i}.{module}": preset for i in range(4) for module, preset in modules.items()}
    presets["layers.2.mlp.up"] = presets["layers.2.mlp.down"] = "nvfp4"
    wheres = {rule.where: rule.weights for rule in mixed_rules(presets)[:-1]}
    assert wheres == {r"layers\.[^.]+\.(attn\.o|attn\.q)": "int8", r"layers\.2\.(mlp\.down|mlp\.up)": "nvfp4"}
    assert mixed_rules(presets)[-1] == preset_rules("w4")[0]
    assert mixed_rules(dict.fromkeys(presets, "w4")) == preset_rules("w4")


# ---------------------------------------------------------------- measuring


@pytest.mark.parametrize("name", ["llama-plain", pytest.param("deepseek-3.2", marks=pytest.mark.slow)])
def test_each_matrix_alone_is_measured_as_the_loaded_model_answers(name, tmp_path):
    config = save_case(name, tmp_path / "plain")
    stored, model = open_model(tmp_path / "plain"), config.build(Unroll())
    tokens = np.random.default_rng(0).integers(3, config.vocab, (3, 13)).astype(np.int32)
    runner = LayerRunner(config, stored.weights, schemes_of(model, preset_rules("w8")))
    meter = SensitivityMeter(runner, CalibrationData(tokens, np.ones_like(tokens)))
    assert meter.divergence({}) == pytest.approx(0, abs=1e-9)
    w2 = preset_rules("w2")[0]
    measured = {matrix: kl["w2"] for matrix, kl in meter.sensitivities({"w2": Scheme("int2", calibration="minmax")})}
    assert measured.keys() == schemes_of(model, preset_rules("w8")).keys()
    exact = load_lm(tmp_path / "plain", run=Unroll()).logits(tokens)
    some = list(measured)[:: max(1, len(measured) // 4)]
    cases = [(w2, matrix, measured[matrix]) for matrix in some]
    # The largest number of a token lies between two integers, where another order of sums decides; in fp8 it is a number itself.
    data = preset_rules("fp8")[0]
    cases.append((data, some[-1], meter.divergence({some[-1]: data.scheme()})))
    for rule, matrix, kl in cases:
        rule = rule.model_copy(update={"where": matrix.replace(".", r"\.")})
        other = load_lm(tmp_path / "plain", rules=[rule], run=Unroll()).logits(tokens)
        assert kl > 1e-6
        assert kl == pytest.approx(divergence(exact, other), rel=0.01), (rule, matrix)


def test_padding_is_not_measured(tmp_path):
    config = save_case("llama-plain", tmp_path / "plain")
    stored, model = open_model(tmp_path / "plain"), config.build(Unroll())
    tokens = np.random.default_rng(0).integers(3, config.vocab, (2, 9)).astype(np.int32)
    schemes = schemes_of(model, preset_rules("w2"))
    runner, values = LayerRunner(config, stored.weights, schemes), list[float]()
    for more in (0, 5):
        data = CalibrationData(np.pad(tokens, ((0, 0), (0, more))), np.pad(np.ones_like(tokens), ((0, 0), (0, more))))
        values.append(SensitivityMeter(runner, data).divergence(schemes))
    assert values[0] > 1e-6
    assert values[1] == pytest.approx(values[0], rel=1e-3)


# ---------------------------------------------------------------- the job


def test_the_file_quantizes_to_the_promised_bits(tmp_path):
    save_case("llama-plain", tmp_path / "plain")
    presets, budget = ["w8", "w4", "w2"], 7.5
    search_result = search_recipe(str(tmp_path / "plain"), tmp_path / "mixed.yml", budget, presets, SYNTHETIC, samples=3)
    assert search_result["bits"] <= budget
    assert len({row["preset"] for row in search_result["weights"]}) > 1
    result = quantize(str(tmp_path / "plain"), tmp_path / "out", read_rules(tmp_path / "mixed.yml"))
    numbers, size = (sum(row[name] for row in result["weights"]) for name in ("numbers", "bytes"))
    assert 8 * size / numbers == pytest.approx(search_result["bits"], rel=1e-12)
    bits, promised = ({row["name"]: row["bits"] for row in rows} for rows in (result["weights"], search_result["weights"]))
    assert bits == promised


def test_a_killed_search_goes_on_from_what_it_measured(tmp_path, monkeypatch):
    save_case("llama-plain", tmp_path / "plain")
    options = {"source": str(tmp_path / "plain"), "data": SYNTHETIC, "samples": 3}
    whole = search_recipe(target=tmp_path / "whole.yml", budget=7.5, presets=["w8", "w4", "w2"], **options)
    assert not (tmp_path / "whole.yml.part").exists()
    target, part, measure = tmp_path / "mixed.yml", tmp_path / "mixed.yml.part", SensitivityMeter.divergence
    calls = []

    def counted(self, schemes, i=0, inputs=None):
        if len(schemes) == 1:
            if len(calls) == 20:
                raise KeyboardInterrupt
            calls.append(*schemes)
        return measure(self, schemes, i, inputs)

    monkeypatch.setattr(SensitivityMeter, "divergence", counted)
    with pytest.raises(KeyboardInterrupt):
        search_recipe(target=target, budget=7.5, presets=["w8", "w4", "w2"], **options)
    assert not target.exists()
    # As a kill in the middle of a write leaves it.
    part.write_bytes(part.read_bytes()[:-9])
    calls.clear()

    def listed(self, schemes, i=0, inputs=None):
        calls.append(schemes)
        return measure(self, schemes, i, inputs)

    monkeypatch.setattr(SensitivityMeter, "divergence", listed)
    messages = []
    again = search_recipe(target=target, budget=7.5, presets=["w8", "w4", "w2"], say=messages.append, **options)
    assert "resuming: 19 roundings are measured already" in messages
    assert sum(len(schemes) == 1 for schemes in calls) == 3 * len(again["weights"]) - 19
    drop = {"seconds", "target"}
    assert {k: v for k, v in again.items() if k not in drop} == {k: v for k, v in whole.items() if k not in drop}
    assert target.read_text() == (tmp_path / "whole.yml").read_text()
    assert not part.exists()


def test_what_another_search_left_is_not_taken(tmp_path):
    save_case("llama-plain", tmp_path / "plain")
    for text in ('{"source": "hub 1", "data": "2"}\n', "a note\n", "[3]\n"):
        (tmp_path / "a.yml.part").write_text(text)
        with pytest.raises(BadInput, match=r"a\.yml\.part"):
            search_recipe(str(tmp_path / "plain"), tmp_path / "a.yml", 7.5, ["w8", "w4"], SYNTHETIC, samples=3)
        assert (tmp_path / "a.yml.part").read_text() == text


@pytest.mark.slow
def test_a_mixed_recipe_beats_presets_of_as_many_bits_on_other_text(tmp_path, capsys):
    """stories260K: the second half of the text judges what was chosen on the first."""
    text = stories_text().read_text(encoding="utf-8")
    (tmp_path / "first.txt").write_text(text[: len(text) // 2], encoding="utf-8")
    words = [f"data.source={tmp_path / 'first.txt'}", "samples=16", "data.sequence=256", "--json"]
    assert main(["quantize", str(stories_model()), str(tmp_path / "mixed.yml"), "search=4.865", *words]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["recipe"] == "mixed"
    assert document["bits"] <= 4.865 < document["presets"]["nvfp4"]["bits"]
    lm = argosy.load(stories_model())
    ids = lm.tokenizer.encode(text[len(text) // 2 :])[: 16 * 256]
    tokens = np.asarray(ids).reshape(16, 256)
    exact = lm.logits(tokens)
    kl = {name: divergence(exact, argosy.load(stories_model(), quantization=name).logits(tokens)) for name in ("w4", "nvfp4")}
    mixed = divergence(exact, argosy.load(stories_model(), quantization=str(tmp_path / "mixed.yml")).logits(tokens))
    assert mixed < 0.9 * kl["nvfp4"] < kl["w4"]


def test_models_without_next_tokens_are_refused(tmp_path):
    save_case("bert-pooler", tmp_path / "plain")
    with pytest.raises(Unsupported, match="predicts none"):
        search_recipe(str(tmp_path / "plain"), tmp_path / "a.yml", 6, ["w8", "w4"], SYNTHETIC, samples=2)
    assert not (tmp_path / "a.yml").exists()


@pytest.mark.parametrize(
    ("out", "words", "problem"),
    [
        ("a.yml", ["search=4", "DATA"], "search=4 is below every candidate: w8 8.424, w4 4.560, nvfp4 4.870"),
        ("a.yml", ["search=9", "DATA"], "search=9 is above every candidate"),
        ("a.yml", ["search=6", "DATA", "samples=9000"], "fewer than samples=9000"),
        ("a.yml", ["search=6"], "search needs calibration data"),
        ("a.yml", ["search=6", "DATA", "candidates=w4"], "two candidates"),
        ("a.yml", ["search=6", "DATA", "candidates=[w4,w9]"], "no preset `w9`"),
        ("a.yml", ["search=6", "DATA", "preset=w4"], "preset is for writing a model"),
        ("a.yml", ["search=6", "DATA", "method=gptq"], "method is for writing a model"),
        ("a.yml", ["preset=w4"], "only a search writes"),
        ("a.yml", ["search=0", "DATA"], "search"),
        ("out", ["search=6", "DATA"], "does not end in .yml"),
        ("out", ["preset=w4", "candidates=w8"], "candidates are for search"),
        ("none/a.yml", ["search=6", "DATA"], "no folder for"),
        ("taken.yml", ["search=6", "DATA"], "exists"),
    ],
)
def test_search_mistakes_are_one_error_before_work_starts(out, words, problem, tmp_path, capsys):
    (tmp_path / "taken.yml").write_text("mine")
    words = [word.replace("DATA", f"data.source={stories_text()}") for word in words]
    assert main(["quantize", str(stories_model()), str(tmp_path / out), *words]) == 2
    stderr = capsys.readouterr().err
    assert problem in stderr
    assert "measuring" not in stderr
    assert [path.name for path in tmp_path.iterdir()] == ["taken.yml"]
    assert (tmp_path / "taken.yml").read_text() == "mine"


@pytest.mark.parametrize(
    ("target", "words", "problem"),
    [
        ("rules.yml", {}, "rules.yml is a file of rules, which only a search writes"),
        ("folder", {"search": 4.5}, "a search writes a file of rules, and folder does not end in .yml"),
        ("rules.yml", {"search": 4.5, "preset": "w4"}, "preset is for writing a model"),
        ("rules.yml", {"search": 4.5}, "search needs calibration data"),
    ],
)
def test_settings_that_are_not_those_of_a_search_are_refused(target: str, words: dict[str, Any], problem: str):
    with pytest.raises(BadInput, match=problem):
        check_search(Quantize(**words), target)
