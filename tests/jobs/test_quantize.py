"""`argosy quantize`: what it writes loads as what was rounded in memory, in every layout, and bad input leaves nothing."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relative, shared, stories_model
from laws.families import CASES, STRUCTURES, noisy_model

import argosy
from argosy.adapt.formats.table import FORMATS
from argosy.adapt.quant import QuantizedEinsum
from argosy.adapt.rules import ACTIVATIONS, NAMES, PRESETS, Rule, preset_rules, read_rules, rules_named, schemes_of
from argosy.adapt.surgery import find
from argosy.checkpoint.open import open_model
from argosy.cli import main
from argosy.core.errors import BadInput, UserError
from argosy.data.settings import DataSettings
from argosy.infer.lm import LM
from argosy.infer.load import load_lm
from argosy.jobs.convert import convert
from argosy.jobs.quantize import quantize
from argosy.models.parts.stack import Scan, Unroll

TOKENS = [[5, 9, 100, 23, 7, 60]]


def save_model(config, folder: Path) -> LM:
    lm = LM(config, noisy_model(config, Unroll()), None)
    lm.save(folder, format="argosy")
    return lm


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_written_model_is_the_one_rounded_in_memory(name, tmp_path):
    """In both layouts, experts and latent attention too."""
    config = CASES[name]
    save_model(config, tmp_path / "plain")
    rules = [Rule(weights="int4", granularity=8, activations="int8")]
    quantize(str(tmp_path / "plain"), tmp_path / "w4", rules)
    expected = load_lm(tmp_path / "plain", rules=rules)
    exact = expected.logits(TOKENS) if config.causal else None
    for run in (Unroll(), Scan()):
        got = load_lm(tmp_path / "w4", run=run)
        some = [of for of in find(got.module, ".*").values() if isinstance(of, QuantizedEinsum)]
        assert some
        assert all(of.values.dtype in (jnp.uint8, jnp.int8) for of in some)
        if exact is not None:
            assert relative(got.logits(TOKENS), exact) < 1e-5


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_writes_what_every_verb_reads(preset, tmp_path):
    source = shared("models/stories260k")
    is_static = PRESETS[preset].get("activations_scale") == "static"
    data = DataSettings(source=str(shared("text/tinystories_sample.txt")), sequence=64) if is_static else None
    result = quantize(str(source), tmp_path / "out", preset_rules(preset), data=data, samples=8)
    assert len(result["weights"]) == 35
    assert all(0 < row["error"] < 0.7 for row in result["weights"])
    lm = argosy.load(tmp_path / "out")
    prompt = lm.tokenizer.encode("Once upon a time")
    logits = lm.logits([prompt])
    # Static scales need data, which there is not while loading.
    if not is_static:
        inline, later = argosy.load(source, quantization=preset), argosy.load(source)
        assert len(later.quantize(preset)) == 35
        assert np.array_equal(logits, inline.logits([prompt]))
        assert np.array_equal(logits, later.logits([prompt]))
    text = lm.generate(["Once upon a time"], max_tokens=8)[0].text
    if preset != "w2":
        assert text.startswith(", there was a little")
    # Floats of it are the same model.
    convert(str(tmp_path / "out"), tmp_path / "floats", "hub", None)
    exact = relative(argosy.load(tmp_path / "floats").logits([prompt]), logits)
    assert exact < (1e-5 if PRESETS[preset].get("activations") is None else 0.5)


def test_rules_of_which_the_first_that_matches_decides(tmp_path):
    file = tmp_path / "rules.yml"
    file.write_text(
        "rules:\n  - {where: 'layers\\..*\\.mlp\\.down', weights: int8}\n  - {where: 'layers\\.0\\..*'}\n"
        "  - {where: 'layers\\..*\\.mlp\\..*', weights: mxfp4, activations: mxfp8}\n  - {where: embed, weights: int4}\n"
    )
    config = CASES["llama-plain"]
    model = noisy_model(config, Unroll())
    schemes = schemes_of(model, read_rules(file))
    assert schemes["layers.0.mlp.down"].weights == "int8"
    assert "layers.0.mlp.up" not in schemes
    assert "layers.1.attn.q" not in schemes
    assert schemes["layers.1.mlp.up"].activations == "mxfp8"
    assert schemes["embed"].weights == "int4"
    # Layers that differ cannot be stacked: the model is loaded unrolled.
    save_model(config, tmp_path / "plain")
    quantize(str(tmp_path / "plain"), tmp_path / "mixed", read_rules(file))
    lm = load_lm(tmp_path / "mixed", run=Scan())
    assert relative(lm.logits(TOKENS), load_lm(tmp_path / "plain", rules=read_rules(file), run=Unroll()).logits(TOKENS)) < 1e-5


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("rules: [{weights: int9}]", "did you mean `int8`"),
        ("rules: [{weights: mxfp4, calibration: minmax}]", "has no minimum"),
        ("rules: [{weights: int4, granularity: rows}]", "granularity"),
        ("rules: [{weights: int4, calibration: median}]", "absmax, minmax"),
        ("rules: [{activations: int8}]", "keeps a module"),
        ("rules: [{weights: int8, group_size: 4}]", "granularity"),
        ("rules: []", "holds no rules"),
        ("other: 3", "other"),
    ],
)
def test_wrong_rules_are_refused_with_the_right_words(text, problem, tmp_path):
    (tmp_path / "rules.yml").write_text(text)
    with pytest.raises(UserError, match=problem):
        rules_named(str(tmp_path / "rules.yml"))


def test_what_matches_nothing_is_refused():
    model = noisy_model(CASES["llama-plain"], Unroll())
    with pytest.raises(BadInput, match="rule 1: nothing in the model matches"):
        schemes_of(model, [Rule(where="layers.*.atn.*", weights="int8")])
    with pytest.raises(BadInput, match="rule 2: everything that"):
        schemes_of(model, [Rule(weights="int8"), Rule(where=r"layers\..*\.mlp\..*", weights="int4")])
    with pytest.raises(BadInput, match="no rule quantizes"):
        schemes_of(model, [Rule()])
    for name, hint in (("w9", "w8"), ("gptq", "preset=w4 method=gptq"), ("Q4_K_M", "OUT.gguf preset=q4_k_m"), ("iq4_xs", "GGUF")):
        with pytest.raises(BadInput, match=f"no preset `{name}`") as error:
            preset_rules(name)
        assert hint in str(error.value.hint)


@pytest.mark.parametrize("verb", [["generate", "MODEL", "hi"], ["serve", "MODEL"], ["eval", "MODEL"], ["export", "MODEL", "OUT"]])
def test_a_method_at_load_is_answered_with_the_command_that_has_it(verb, capsys):
    words = [str(stories_model()) if word == "MODEL" else word for word in verb]
    assert main([*words, "quantization=w4", "quantization.method=gptq"]) == 2
    assert "argosy quantize MODEL OUT preset=w4 method=gptq" in capsys.readouterr().err


def test_nothing_is_written_for_a_model_that_cannot_be_quantized(tmp_path):
    config = CASES["llama-plain"]
    save_model(config, tmp_path / "plain")
    quantize(str(tmp_path / "plain"), tmp_path / "w8", preset_rules("w8"))
    with pytest.raises(BadInput, match="quantized already"):
        quantize(str(tmp_path / "w8"), tmp_path / "again", preset_rules("w8"))
    with pytest.raises(BadInput, match="quantized already"):
        load_lm(tmp_path / "w8", rules=preset_rules("w8"))
    with pytest.raises(BadInput, match="no place"):
        load_lm(tmp_path / "w8").save(tmp_path / "hub")
    assert not (tmp_path / "again").exists()
    # A folder of a format that this version lacks.
    meta = json.loads((tmp_path / "w8" / "meta.json").read_text())
    assert meta["quantization"][0]["weights"] == "int8"
    lm = save_model(config, tmp_path / "other")
    w = lm.module.layers
    first = getattr(w, "0").attn.q.w
    first.set_value(first.get_value().at[0, 0].set(jnp.nan))
    lm.save(tmp_path / "damaged", format="argosy")
    with pytest.raises(BadInput, match="not finite"):
        quantize(str(tmp_path / "damaged"), tmp_path / "out", preset_rules("w4"))
    assert not (tmp_path / "out").exists()


def test_rules_that_hit_tied_embeddings_and_routers_are_said(tmp_path):
    messages = {}
    for name, where in {"llama-tied-biased": "embed|layers.*", "mixtral-plain": ".*"}.items():
        save_model(CASES[name], tmp_path / name)
        messages[name] = list[str]()
        quantize(str(tmp_path / name), tmp_path / f"{name}.out", [Rule(where=where, weights="int8")], say=messages[name].append)
        quiet = list[str]()
        quantize(str(tmp_path / name), tmp_path / f"{name}.w8", preset_rules("w8"), say=quiet.append)
        assert not any("a rule rounds" in line for line in quiet)
    assert any("`embed`, which is the head too" in line for line in messages["llama-tied-biased"])
    assert any("such as `layers.0.mlp.router`" in line for line in messages["mixtral-plain"])


def test_names_of_formats_in_settings_are_those_of_the_table():
    assert set(NAMES) == set(FORMATS)
    assert set(ACTIVATIONS) <= set(FORMATS)


def test_after_a_kill_the_table_has_every_weight(tmp_path, monkeypatch):
    """Files that were complete are not written again, and their weights are in the table all the same."""
    save_model(CASES["llama-plain"], tmp_path / "plain")
    source = str(tmp_path / "plain")
    expected = quantize(source, tmp_path / "whole", preset_rules("w4"))["weights"]

    def stop(new: int, all: int, old: int) -> None:
        if new and all > 0 and len(list((tmp_path / "w4.part").rglob("zarr.json"))) > 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(source, tmp_path / "w4", preset_rules("w4"), progress=stop)
    counts = []
    result = quantize(source, tmp_path / "w4", preset_rules("w4"), progress=lambda new, all, old: counts.append(old))
    assert counts[0] > 0
    assert result["weights"] == expected


def test_rules_of_single_layers_hold_while_loading_too(tmp_path):
    """Also where layers would be stacked."""
    save_model(CASES["llama-plain"], tmp_path / "plain")
    rules = [Rule(where=r"layers\.0\..*", weights="int8"), Rule(weights="int4")]
    quantize(str(tmp_path / "plain"), tmp_path / "mixed", rules)
    exact = load_lm(tmp_path / "mixed").logits(TOKENS)
    assert relative(load_lm(tmp_path / "plain", rules=rules, run=Scan()).logits(TOKENS), exact) < 1e-5


@pytest.mark.parametrize("preset", ["w8", "w4", "nvfp4"])
def test_devices_share_a_quantized_model(preset, tmp_path):
    save_model(CASES["llama-plain"], tmp_path / "plain")
    quantize(str(tmp_path / "plain"), tmp_path / "out", preset_rules(preset))
    assert relative(load_lm(tmp_path / "out", tensor=2).logits(TOKENS), load_lm(tmp_path / "out").logits(TOKENS)) < 1e-5


def test_a_model_that_does_not_fit_is_refused(tmp_path, monkeypatch):
    """By its bytes in few bits, not in floats."""
    save_model(CASES["llama-plain"], tmp_path / "plain")
    quantize(str(tmp_path / "plain"), tmp_path / "w4", preset_rules("w4"))
    needs = []
    monkeypatch.setattr("argosy.weights.build.check_fits", lambda needed, model_name: needs.append(needed))
    for options in ({}, {"rules": preset_rules("w4")}):
        load_lm(tmp_path / ("plain" if options else "w4"), **options)
    load_lm(tmp_path / "plain")
    assert needs[0] == needs[1] < needs[2]


def test_a_quantized_model_saves_as_it_is(tmp_path):
    config = CASES["llama-plain"]
    lm = save_model(config, tmp_path / "plain")
    lm.quantize("nvfp4")
    lm.save(tmp_path / "nvfp4", format="argosy")
    again = load_lm(tmp_path / "nvfp4")
    assert relative(again.logits(TOKENS), lm.logits(TOKENS)) < 1e-6
    assert open_model(tmp_path / "nvfp4").quantized is not None
