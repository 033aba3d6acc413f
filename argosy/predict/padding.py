"""The sizes of batches: which calls may share a batch, the sizes that axes are padded to, and how arrays are stacked and split."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from argosy.export.manifest import BundleSignature, TensorSignature
from argosy.predict.settings import BatchingSettings

Arrays = Mapping[str, np.ndarray]
# The shortest length that programs are compiled for, of axes besides that of the batch.
SHORTEST = 16
# Up to twice the shortest, every fourth length has programs: there a step of eight would be a sixth of the work.
STEP = 4
# Lengths up to half as much again have programs between powers of two.
FINE = 128


def batch_axis(signature: BundleSignature) -> str | None:
    """The named axis that is the first of every input and output and whose rows are independent, because it may be padded; None if
    there is none.
    """
    firsts = {spec.shape[0] if spec.shape else None for spec in (*signature.inputs, *signature.outputs)}
    name = next(iter(firsts)) if len(firsts) == 1 else None
    return name if name in signature.padding else None


@dataclass(frozen=True)
class BatchPlan:
    """How requests of a signature are batched.

    axis: the axis of rows; None: each request is computed alone.
    most_rows: limit of rows in a batch.
    most_tokens: limit of a batch's rows times its padded lengths.
    sizes: compiled sizes of each axis that is padded.
    """

    signature: BundleSignature
    axis: str | None
    most_rows: int
    most_tokens: int
    sizes: Mapping[str, Sequence[int]]

    @classmethod
    def of(cls, signature: BundleSignature, settings: BatchingSettings) -> "BatchPlan":
        """The plan of a signature under these settings."""
        axis, most, sizes = batch_axis(signature), 1, {}
        fixed = {at for program in signature.programs for at in program.shapes}
        if axis is not None:
            there = sorted(program.shapes[axis] for program in signature.programs if axis in program.shapes)
            most = min([settings.max_batch_size, *there[-1:], *settings.allowed_batch_sizes[-1:]])
            powers = [*(1 << i for i in range(20) if 1 << i < most), most]
            sizes[axis] = there or list(settings.allowed_batch_sizes) or powers
        for at in signature.padding:
            limit = signature.limits.get(at)
            if at not in fixed and at != axis and limit is not None:
                powers = [SHORTEST << i for i in range(20) if SHORTEST << i < limit]
                halves = [3 * size // 2 for size in powers if size <= FINE]
                between = {*powers, *range(SHORTEST, 2 * SHORTEST, STEP), *halves}
                sizes[at] = [*sorted(size for size in between if size < limit), limit]
        return cls(signature, axis, most, settings.max_batch_tokens, sizes)

    def rows_at(self, sizes: Mapping[str, int]) -> int:
        """The largest number of rows in a batch of these sizes; at least one."""
        tokens = math.prod(self._filled(at, sizes[at]) for at in self.sizes if at != self.axis)
        return max(1, min(self.most_rows, self.most_tokens // tokens))

    def padded(self, sizes: Sequence[Mapping[str, int]]) -> dict[str, int]:
        """The padded sizes of a batch of calls. The bundle pads further if its programs have fixed sizes.

        Args:
            sizes: the sizes of each call.
        """
        largest = {at: max(call_sizes[at] for call_sizes in sizes) for at in sizes[0]}
        if self.axis is not None:
            largest[self.axis] = sum(call_sizes[self.axis] for call_sizes in sizes)
        return {at: self._filled(at, size) for at, size in largest.items()}

    def _filled(self, at: str, size: int) -> int:
        return min((fit for fit in self.sizes.get(at, ()) if fit >= size), default=size)

    def combinations(self) -> list[dict[str, int]] | None:
        """Every combination of axis sizes that a batch may have, fewest tokens first; None if an axis may have any size."""
        open_axes = {str(size) for spec in self.signature.inputs for size in spec.shape if isinstance(size, str)}
        fixed = {at for program in self.signature.programs for at in program.shapes}
        if open_axes - fixed - set(self.sizes):
            return None
        opened = {at: sizes for at, sizes in self.sizes.items() if at not in fixed}
        every = [dict(zip(opened, sizes, strict=True)) for sizes in product(*opened.values())]
        fitting = [sizes for sizes in every if self.axis not in sizes or sizes[self.axis] <= self._batch_at(sizes)]
        return sorted(fitting, key=lambda sizes: math.prod(sizes.values()))

    def _batch_at(self, sizes: Mapping[str, int]) -> int:
        """The largest batch, filled up, of these lengths."""
        return self._filled(str(self.axis), self.rows_at(sizes))


def stack_inputs(plan: BatchPlan, calls: Sequence[Arrays], sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """The inputs of several calls, concatenated, with every axis padded to its size."""
    return {spec.name: _stacked([arrays[spec.name] for arrays in calls], spec, sizes) for spec in plan.signature.inputs}


def split_outputs(plan: BatchPlan, outputs: Mapping[str, Any], calls: Sequence[Mapping[str, int]]) -> list[dict[str, Any]]:
    """The outputs of each call of a batch.

    Args:
        calls: the sizes of each call.
    """
    shapes = {spec.name: spec.shape for spec in plan.signature.outputs}
    results, low = [], 0
    for sizes in calls:
        call_outputs, rows = {}, sizes[str(plan.axis)]
        for name, value in outputs.items():
            part = value[low : low + rows]
            if isinstance(part, np.ndarray):
                # Copied: a view would keep the arrays of the whole batch in memory.
                parts = [slice(None), *(slice(sizes.get(str(size))) for size in shapes.get(name, [None])[1:])]
                part = part[tuple(parts)].copy()
            call_outputs[name] = part
        results.append(call_outputs)
        low += rows
    return results


def join_outputs(outputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Concatenates the outputs of a request's parts."""
    joined: dict[str, Any] = {}
    for name, first in outputs[0].items():
        values = [part[name] for part in outputs]
        joined[name] = np.concatenate(values) if isinstance(first, np.ndarray) else [text for value in values for text in value]
    return joined


def _stacked(arrays: Sequence[np.ndarray], spec: TensorSignature, sizes: Mapping[str, int]) -> np.ndarray:
    shape = tuple(sizes[size] if isinstance(size, str) else size for size in spec.shape)
    if len(arrays) == 1 and arrays[0].shape == shape:
        return arrays[0]
    out = np.full(shape, spec.pad, arrays[0].dtype)
    low = 0
    for a in arrays:
        out[(slice(low, low + len(a)), *map(slice, a.shape[1:]))] = a
        low += len(a)
    return out
