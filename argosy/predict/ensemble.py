"""Runs an ensemble: the models of several steps in one request. Tensors between steps never leave the process.

Each step waits in the queue of its member model, where it shares batches with other requests of that model. Each request looks up its
members, so a reloaded member is used at once. If the signature of a member has changed, the ensemble is not ready until it is planned
again.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from argosy.core.errors import BadInput, nearest
from argosy.export.calls import checked_inputs
from argosy.export.manifest import BundleManifest, BundleSignature
from argosy.predict.batching import Batcher, CallResult, Unloaded
from argosy.predict.ensemble_plan import EnsemblePlan, member_inputs, member_outputs, plan_ensemble
from argosy.predict.settings import BatchingSettings, EnsembleSettings
from argosy.predict.tensors import TEXTS

SIGNATURE = "ensemble"


class MemberNotReady(Exception):
    """A member of a step is not loaded, or has changed since the ensemble was planned.

    message: the name of the member, and the reason.
    """

    def __init__(self, message: str):
        super().__init__(message)
        self.message = message


class Ensemble:
    """An ensemble, which stands in for both the bundle and the batcher of a version.

    manifest: the manifest with the signature of the ensemble.
    settings: the smallest batch limits of the members.

    Args:
        ensemble: the settings of the ensemble.
        member: returns the manifest and the queue of a model and version. Raises `MemberNotReady`.
        seen: called after each request with (signature, number of calls, rows, seconds).
    """

    def __init__(
        self,
        ensemble: EnsembleSettings,
        member: Callable[[str, int | None], tuple[BundleManifest, "Batcher | Ensemble"]],
        seen: Callable[[str, int, int, float], None] = lambda *_: None,
    ):
        self.ensemble, self.member, self.seen = ensemble, member, seen
        self.signatures: list[BundleSignature] = []
        batchers = []
        for i, step in enumerate(ensemble.steps):
            manifest, batcher = member(step.model, step.version)
            try:
                self.signatures.append(manifest.signature(step.signature))
            except BadInput as error:
                raise BadInput(f"step {i + 1}: {error.what}", hint=error.hint) from None
            batchers.append(batcher)
        self.plan: EnsemblePlan = plan_ensemble(ensemble, self.signatures)
        about: dict[str, Any] = {"versions": {}, "written": "", "readable_until": "", "weights": [], "files": {}}
        self.manifest = BundleManifest(default=SIGNATURE, signatures={SIGNATURE: self.plan.signature}, **about)
        self.settings: BatchingSettings = min((batcher.settings for batcher in batchers), key=lambda batcher: batcher.max_batch_size)
        self.waiting: Sequence[Any] = ()
        self._running = 0

    @property
    def idle(self) -> bool:
        return self._running == 0

    def preprocessed(self, signature: BundleSignature, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the inputs unchanged, because the members run their own steps."""
        return dict(inputs)

    def close(self, *, drop: bool = False) -> None:
        """Does nothing, because the members own the threads and the memory."""

    async def call(self, inputs: Mapping[str, Any], signature: str | None = None, priority: int = 0) -> CallResult:
        """Runs the steps of a request and returns the outputs.

        Args:
            inputs: the inputs by name.
            signature: the name of the signature. None stands for the default one.
            priority: the priority level in the queues of members that have levels.

        Raises:
            BadInput: the inputs do not fit.
            MemberNotReady, QueueFull, Unloaded: an error of a member.
        """
        tensors = self._checked(self.manifest.signature(signature), inputs)
        begin, queued, computed, rows = time.perf_counter(), 0.0, 0.0, 0
        self._running += 1
        try:
            for level in self.plan.levels:
                results = await _together([self._called(i, tensors, priority) for i in level])
                for i, result in zip(level, results, strict=True):
                    tensors |= {tensor: result.outputs[name] for name, tensor in self.plan.outputs[i].items()}
                queued += max(result.queued for result in results)
                computed += max(result.computed for result in results)
                rows = max(rows, *(result.rows for result in results))
        finally:
            self._running -= 1
        of = self.plan.signature
        count = len(tensors[of.inputs[0].name]) if of.padding and of.inputs else 1
        self.seen(SIGNATURE, 1, count, time.perf_counter() - begin)
        return CallResult({spec.name: tensors[spec.name] for spec in of.outputs}, queued, computed, rows)

    async def _called(self, i: int, tensors: Mapping[str, Any], priority: int) -> CallResult:
        step = self.ensemble.steps[i]
        inputs = {name: tensors[tensor] for name, tensor in self.plan.inputs[i].items()}
        last = None
        while True:
            manifest, batcher = self.member(step.model, step.version)
            if batcher is last:
                raise Unloaded
            if step.signature not in (None, *manifest.signatures) or not _alike(manifest.signature(step.signature), self.signatures[i]):
                raise MemberNotReady(f"`{step.model}` has another signature since it was loaded again")
            try:
                return await batcher.call(inputs, step.signature, priority if batcher.settings.priority_levels else 0)
            except Unloaded:
                last = batcher
            except BadInput as error:
                raise BadInput(f"step {i + 1} (`{step.model}`): {error.what}", hint=error.hint) from None

    def _checked(self, of: BundleSignature, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Checks the inputs. Returns arrays of their types and lists of texts, by name."""
        texts = {spec.name for spec in of.inputs if spec.dtype == TEXTS}
        if unknown := [name for name in inputs if name not in {spec.name for spec in of.inputs}]:
            raise BadInput(f"no input `{unknown[0]}`", hint=nearest(unknown[0], [spec.name for spec in of.inputs]))
        if missing := [name for name in texts if name not in inputs]:
            raise BadInput(f"input `{missing[0]}` is missing")
        plain = of.model_copy(update={"inputs": [spec for spec in of.inputs if spec.name not in texts]})
        arrays = {name: value for name, value in inputs.items() if name not in texts}
        return checked_inputs(plain, arrays) | {name: inputs[name] for name in texts}

    def plans_like(self, other: "Ensemble") -> bool:
        """Whether another ensemble has the same steps, with members of the same signatures."""
        same = self.ensemble == other.ensemble
        return same and all(_alike(a, b) for a, b in zip(self.signatures, other.signatures, strict=True))


def ensemble_order(ensembles: Mapping[str, EnsembleSettings]) -> list[str]:
    """Returns the names of ensembles, with members before the ensembles that use them. In a cycle the order is arbitrary."""
    order: dict[str, None] = {}

    def visit(name: str, path: frozenset[str]) -> None:
        if name in order or name in path:
            return
        for step in ensembles[name].steps:
            if step.model in ensembles:
                visit(step.model, path | {name})
        order[name] = None

    for name in ensembles:
        visit(name, frozenset())
    return list(order)


def circle_of(name: str, ensembles: Mapping[str, EnsembleSettings]) -> str | None:
    """Returns the cycle of members that an ensemble is part of, as text; None if there is none."""

    def visit(path: tuple[str, ...]) -> str | None:
        for step in ensembles[path[-1]].steps:
            if step.model == name:
                return " -> ".join([*path, name])
            if step.model in ensembles and step.model not in path and (circle := visit((*path, step.model))):
                return circle
        return None

    return visit((name,))


def _alike(first: BundleSignature, second: BundleSignature) -> bool:
    """Whether two signatures have the same inputs and outputs. Programs and weights may differ."""
    return first is second or (
        member_inputs(first) == member_inputs(second)
        and member_outputs(first) == member_outputs(second)
        and first.preprocess == second.preprocess
        and first.padding == second.padding
    )


async def _together(calls: Sequence[Awaitable[CallResult]]) -> list[CallResult]:
    """Runs calls concurrently and returns their results. The first call that fails cancels the others."""
    if len(calls) == 1:
        return [await calls[0]]
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
