"""Writes rules that give each matrix of the layers its preset. Modules with the same preset in the same layers share a rule."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from argosy.adapt.rules import Rule, preset_rules


def mixed_rules(presets: Mapping[str, str]) -> list[Rule]:
    """Returns the rules of a mixed recipe: narrow rules first, and at the end one for all other matrices of the layers.

    Args:
        presets: the preset of each matrix, by its per-layer name, such as layers.3.attn.q.
    """
    layers: dict[str, set[int]] = defaultdict(set)
    by_preset: dict[tuple[str, str], set[int]] = defaultdict(set)
    for name, preset in presets.items():
        layer, module = name.removeprefix("layers.").split(".", 1)
        layers[module].add(int(layer))
        by_preset[preset, module].add(int(layer))
    common = Counter(presets.values()).most_common(1)[0][0]
    shared: dict[tuple[str, tuple[int, ...] | None], list[str]] = defaultdict(list)
    for (preset, module), layer_numbers in by_preset.items():
        if preset != common:
            shared[preset, None if layer_numbers == layers[module] else tuple(sorted(layer_numbers))].append(module)
    # Rules do not overlap, except with the last one.
    wheres = [(preset, pattern(layer_numbers, modules)) for (preset, layer_numbers), modules in shared.items()]
    rules = [preset_rules(preset)[0].model_copy(update={"where": where}) for preset, where in wheres]
    return [*rules, *preset_rules(common)]


def pattern(layers: tuple[int, ...] | None, modules: list[str]) -> str:
    """Returns a regular expression for modules of some layers. `layers`: the indices, None for every layer, also of stacked ones."""
    numbers = "[^.]+" if layers is None else any_of_patterns(map(str, layers))
    return rf"layers\.{numbers}\.{any_of_patterns(map(re.escape, sorted(modules)))}"


def any_of_patterns(parts: Iterable[str]) -> str:
    """Returns a regular expression that matches any of the patterns."""
    some = list(parts)
    return some[0] if len(some) == 1 else f"({'|'.join(some)})"
