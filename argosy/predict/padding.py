"""Plans the sizes of batches: the calls that may share a batch, the sizes that axes are padded to, and how arrays are stacked and
split."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from argosy.export.manifest import BundleSignature, TensorSignature
from argosy.predict.settings import BatchingSettings

Arrays = Mapping[str, np.ndarray]
# The shortest compiled length of axes other than the batch axis.
SHORTEST = 16
# The step between compiled lengths up to twice the shortest. A step of eight would add up to a sixth of the work there.
STEP = 4
# Up to one and a half times this length, there are compiled lengths between powers of two.
FINE = 128


def batch_axis(signature: BundleSignature) -> str | None:
    """Returns the batch axis: the named axis that is the first of every input and output and may be padded, so that its rows are
    independent. None if there is none.
    """
    firsts = {spec.shape[0] if spec.shape else None for spec in (*signature.inputs, *signature.outputs)}
    name = next(iter(firsts)) if len(firsts) == 1 else None
    return name if name in signature.padding else None


@dataclass(frozen=True)
class BatchPlan:
    """How requests of a signature are batched.

    signature: the signature.
    axis: the batch axis. None computes each request by itself.
    most_rows: the most rows of a batch.
    most_tokens: the limit of rows times padded lengths.
    sizes: the compiled sizes of each axis that is padded.
    """

    signature: BundleSignature
    axis: str | None
    most_rows: int
    most_tokens: int
    sizes: Mapping[str, Sequence[int]]

    @classmethod
    def of(cls, signature: BundleSignature, settings: BatchingSettings) -> "BatchPlan":
        """Plans a signature under these settings."""
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
        """Returns the largest number of rows of a batch of these sizes, at least one."""
        tokens = math.prod(self._filled(at, sizes[at]) for at in self.sizes if at != self.axis)
        return max(1, min(self.most_rows, self.most_tokens // tokens))

    def padded(self, sizes: Sequence[Mapping[str, int]]) -> dict[str, int]:
        """Returns the padded sizes of a batch of calls. The bundle pads further if its programs have fixed sizes.

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
        """Returns every combination of padded sizes that a batch may have, those with the fewest tokens first. None if an axis may
        have any size."""
        open_axes = {str(size) for spec in self.signature.inputs for size in spec.shape if isinstance(size, str)}
        fixed = {at for program in self.signature.programs for at in program.shapes}
        if open_axes - fixed - set(self.sizes):
            return None
        opened = {at: sizes for at, sizes in self.sizes.items() if at not in fixed}
        every = [dict(zip(opened, sizes, strict=True)) for sizes in product(*opened.values())]
        fitting = [sizes for sizes in every if self.axis not in sizes or sizes[self.axis] <= self._batch_at(sizes)]
        return sorted(fitting, key=lambda sizes: math.prod(sizes.values()))

    def _batch_at(self, sizes: Mapping[str, int]) -> int:
        """Returns the padded number of rows of the largest batch of these lengths."""
        return self._filled(str(self.axis), self.rows_at(sizes))


def stack_inputs(plan: BatchPlan, calls: Sequence[Arrays], sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Concatenates the inputs of several calls, with every axis padded to its size in `sizes`."""
    return {spec.name: _stacked([arrays[spec.name] for arrays in calls], spec, sizes) for spec in plan.signature.inputs}


def split_outputs(plan: BatchPlan, outputs: Mapping[str, Any], calls: Sequence[Mapping[str, int]]) -> list[dict[str, Any]]:
    """Splits the outputs of a batch into those of each call.

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
                # Copied, because a view would keep the arrays of the whole batch in memory.
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
