"""Rules that say a preset for each matrix of the layers, as few as there are sets of layers: modules that agree share a pattern."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from argosy.adapt.rules import Rule, preset_rules


def mixed_rules(presets: Mapping[str, str]) -> list[Rule]:
    """The rules of a mixed recipe: narrow ones first, and at the end one for every other matrix of the layers.

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
    """Matches modules of layers. None: of every layer, in a model whose layers are stacked too."""
    numbers = "[^.]+" if layers is None else any_of_patterns(map(str, layers))
    return rf"layers\.{numbers}\.{any_of_patterns(map(re.escape, sorted(modules)))}"


def any_of_patterns(parts: Iterable[str]) -> str:
    """Matches any of these."""
    some = list(parts)
    return some[0] if len(some) == 1 else f"({'|'.join(some)})"
