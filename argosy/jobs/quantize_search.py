"""`argosy quantize MODEL OUT.yml search=4.5`: proposes a mixed recipe under a budget of bits per weight, as a file of rules."""

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from argosy.adapt.calibration.data import calibration_data
from argosy.adapt.calibration.layers import LayerRunner
from argosy.adapt.quant import Scheme, by_layer
from argosy.adapt.rules import Rule, check_dynamic, preset_rules, schemes_of
from argosy.adapt.search.budget import PresetCost, within_budget
from argosy.adapt.search.measured import MeasuredDivergences
from argosy.adapt.search.patterns import mixed_rules
from argosy.adapt.search.sensitivity import SensitivityMeter, bits_of
from argosy.core.counts import plural
from argosy.core.errors import BadInput, Unsupported
from argosy.core.process.signals import before_leaving
from argosy.core.settings import dump
from argosy.core.settings.scalars import yaml_document
from argosy.core.storage import Store
from argosy.data.settings import DataSettings
from argosy.jobs.convert import identity_of, open_source
from argosy.jobs.quantize import Say, layer_progress
from argosy.models.parts.stack import Unroll
from argosy.observe.readable import one_line
from argosy.weights.build import stored_tokenizer


def search_recipe(
    source: str,
    target: Path,
    budget: float,
    presets: Sequence[str],
    data: DataSettings,
    *,
    samples: int,
    say: Say = lambda _: None,
) -> dict[str, Any]:
    """Writes the rules that stay within a budget of bits per weight and change the model's output least. Returns the measurements.
    After a kill, the same call continues with the stored measurements.

    Args:
        target: a new YAML file.
        budget: the average bits per weight in the matrices of the layers, including scales.
        presets: the names in `PRESETS` to choose from.
        data: the calibration data.
        samples: the number of sequences of calibration data.

    Raises:
        BadInput: the source is not a model or already quantized, the target exists, there is no such preset, the budget is below the
            cheapest preset or above the dearest, or the data has too few tokens. Nothing is written.
        Unsupported: the model does not predict tokens.
    """
    start = time.monotonic()
    check_file(target)
    schemes = {name: preset_scheme(name) for name in presets}
    if len(schemes) < 2:
        raise BadInput("a search needs two candidates", hint="candidates=w8 candidates=w4")
    stored = open_source(source, say)
    if stored.quantized is not None:
        raise BadInput(f"{source} is quantized already", hint="search with the model it came from")
    if not stored.config.causal or stored.config.scored:
        problem = f"search compares next tokens, and {source} predicts none"
        raise Unsupported(problem, hint="`argosy quantize MODEL OUT preset=w8`")
    model = stored.config.build(Unroll())
    runner = LayerRunner(stored.config, stored.weights, by_layer(model, schemes_of(model, [Rule(weights="int8")])))
    sizes = matrix_bits(runner, schemes)
    numbers = sum(count for count, _ in sizes.values())
    uniform = {preset: sum(bits[preset] for _, bits in sizes.values()) / numbers for preset in schemes}
    check_budget(budget, uniform)
    tokens = calibration_data(
        *(data, samples, stored_tokenizer(stored)), vocab=stored.config.vocab, context=stored.config.context
    )
    say(f"measuring {plural(len(sizes), 'weight')} on {plural(tokens.size, 'token')} of {data.source_name}")
    identity = {"source": identity_of(stored, "rules", None, 0)["source"], "data": tokens.identity}
    measured = MeasuredDivergences(target.with_name(f"{target.name}.part"), identity)
    if len(measured):
        say(f"resuming: {plural(len(measured), 'rounding', 'is', 'are')} measured already")
    with before_leaving(lambda: say(f"stopped; what was measured is kept in {measured.path}, and the same command resumes")):
        meter = SensitivityMeter(runner, tokens)
        costs = {
            name: {preset: PresetCost(sizes[name][1][preset], kl) for preset, kl in of.items()}
            for name, of in meter.sensitivities(schemes, layer_progress(say, "measured"), measured)
        }
    mixed_recipe = dict(zip(costs, within_budget(list(costs.values()), int(budget * numbers)), strict=True))
    recipes = {preset: dict.fromkeys(costs, preset) for preset in schemes} | {"mixed": mixed_recipe}
    rows = {
        name: {
            "bits": sum(sizes[matrix][1][preset] for matrix, preset in recipe.items()) / numbers,
            "divergence": meter.divergence({matrix: schemes[preset] for matrix, preset in recipe.items()}),
        }
        for name, recipe in recipes.items()
    }
    # The divergences of matrices do not quite add up, so a preset that fits the budget may still be better.
    best = min((name for name in rows if rows[name]["bits"] <= budget), key=lambda name: rows[name]["divergence"])
    rules = mixed_rules(recipes[best])
    text = rules_text(rules, f"{rows[best]['bits']:.3f} bits a weight, from {one_line(source)}")
    Store(target.resolve().parent).write_text(target.name, text)
    measured.remove()
    return {
        "source": source,
        "target": str(target),
        "budget": budget,
        "tokens": tokens.size,
        "recipe": best,
        **rows[best],
        "presets": {preset: rows[preset] for preset in schemes},
        "mixed": rows["mixed"],
        "rules": [dump(rule) for rule in rules],
        "weights": [
            {
                "name": name,
                "preset": preset,
                "numbers": sizes[name][0],
                "bits": sizes[name][1][preset] / sizes[name][0],
                "divergence": costs[name][preset].divergence,
                "candidates": {preset: cost.divergence for preset, cost in costs[name].items()},
            }
            for name, preset in recipes[best].items()
        ],
        "seconds": time.monotonic() - start,
    }


def check_file(target: Path) -> None:
    """Checks that a new file can be written.

    Raises:
        BadInput: the file cannot be written.
    """
    if target.exists() or target.is_symlink():
        raise BadInput(f"{target} exists", hint="name a new file; nothing is ever overwritten")
    if not target.resolve().parent.is_dir():
        raise BadInput(f"no folder for {target}", hint="make it first")


def preset_scheme(name: str) -> Scheme:
    """Returns the scheme of a preset.

    Raises:
        BadInput: there is no such preset, or its activations have static scales, which the search does not calibrate.
    """
    rules = preset_rules(name)
    check_dynamic(rules, f"search with {name}")
    scheme = rules[0].scheme()
    assert scheme is not None
    return scheme


def matrix_bits(runner: LayerRunner, schemes: Mapping[str, Scheme]) -> dict[str, tuple[int, dict[str, int]]]:
    """Returns (number of weights, {preset: bits}) of each matrix, by its per-layer name."""
    names = [f"layers.{i}.{name}" for i, layer_names in enumerate(runner.names) for name in layer_names]
    bits_by_name = {name: {preset: bits_of(runner, name, scheme) for preset, scheme in schemes.items()} for name in names}
    return {name: (next(iter(of.values()))[1], {preset: bits for preset, (bits, _) in of.items()}) for name, of in bits_by_name.items()}


def check_budget(budget: float, uniform: Mapping[str, float]) -> None:
    """Checks a budget against the bits per weight of each preset alone.

    Raises:
        BadInput: the budget is below or above all of them.
    """
    # Rounded up, so that a budget that is copied from the message is none that is refused again.
    every = ", ".join(f"{name} {math.ceil(1000 * bits) / 1000:.3f}" for name, bits in uniform.items())
    if budget < min(uniform.values()):
        raise BadInput(f"search={budget:g} is below every candidate: {every} bits a weight", hint="more, or a smaller candidate")
    if budget > max(uniform.values()):
        name = max(uniform, key=lambda name: uniform[name])
        raise BadInput(f"search={budget:g} is above every candidate: {every} bits a weight", hint=f"preset={name} fits everywhere")


def rules_text(rules: Sequence[Rule], about: str) -> str:
    """Returns the text of a file of rules, with a comment about its origin."""
    plain = Rule()
    entries = [{key: value for key, value in dump(rule).items() if value != getattr(plain, key)} for rule in rules]
    return f"# {about}\n{yaml_document({'rules': entries})}"
