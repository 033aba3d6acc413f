"""Chooses a preset for each group of weights, so that the bits stay within a budget and the divergence is small.

    minimize    sum over groups of KL(group, preset)
    subject to  sum over groups of bits(group, preset) <= budget

The divergence of several rounded groups is assumed to be the sum of their divergences, as in HAWQ-V2 (arXiv:1911.03852). Every group
starts at its cheapest preset. The step to a dearer preset that saves most KL per bit and still fits is taken, until none fits. Steps
follow the lower convex hull of a group's presets, so that a preset with a small gain does not hide a better one behind it. The sum is
at most one step above the minimum.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class PresetCost(NamedTuple):
    """The cost of a preset for one group of weights.

    bits: the bits of all weights of the group, including scales.
    divergence: the mean KL of the model's next token if only this group is rounded, in nats.
    """

    bits: int
    divergence: float


def convex_hull(costs: Mapping[str, PresetCost]) -> list[str]:
    """Returns the presets of a group on the lower convex hull, from the cheapest on. Each saves less KL per bit than the one before."""
    hull: list[str] = []
    for name in sorted(costs, key=lambda name: (costs[name].bits, costs[name].divergence)):
        if hull and costs[name].divergence >= costs[hull[-1]].divergence:
            continue
        while len(hull) > 1 and gain(costs[hull[-1]], costs[name]) >= gain(costs[hull[-2]], costs[hull[-1]]):
            hull.pop()
        hull.append(name)
    return hull


def gain(cheap: PresetCost, dear: PresetCost) -> float:
    """Returns the KL per bit that a dearer preset saves."""
    return (cheap.divergence - dear.divergence) / max(dear.bits - cheap.bits, 1)


def within_budget(groups: Sequence[Mapping[str, PresetCost]], budget: int) -> list[str]:
    """Chooses a preset for each group within a total number of bits. If the budget is too small, returns the cheapest presets.

    Args:
        groups: the cost of each preset, for each group.
        budget: the total number of bits.
    """
    hulls = [convex_hull(costs) for costs in groups]
    places = [0] * len(groups)
    remaining = budget - sum(costs[hull[0]].bits for costs, hull in zip(groups, hulls, strict=True))
    while True:
        best: tuple[float, int, int] | None = None
        for i, (costs, hull) in enumerate(zip(groups, hulls, strict=True)):
            if places[i] + 1 == len(hull):
                continue
            now, step = (costs[hull[place]] for place in (places[i], places[i] + 1))
            if step.bits - now.bits <= remaining and (best is None or gain(now, step) > best[0]):
                best = (gain(now, step), i, step.bits - now.bits)
        if best is None:
            return [hull[place] for hull, place in zip(hulls, places, strict=True)]
        _, i, bits = best
        places[i] += 1
        remaining -= bits
