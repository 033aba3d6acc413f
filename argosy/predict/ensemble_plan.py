"""Plans an ensemble: the order of its steps, and its signature, from the signatures of its members.

Steps exchange tensors by name. A tensor that no step writes is an input of the ensemble. A tensor that no step reads is an output,
unless `outputs` names others. Shapes are compared before anything runs: the axes of two steps that share a tensor are unified, and an
axis that is unified with a fixed size gets that size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from argosy.core.errors import BadInput, nearest
from argosy.export.calls import shape_text
from argosy.export.manifest import BundleSignature, TensorSignature
from argosy.export.steps import DetokenizeStep, LabelsStep, ProbabilitiesStep
from argosy.predict.padding import batch_axis
from argosy.predict.settings import EnsembleSettings, EnsembleStep
from argosy.predict.tensors import TEXTS

# (index of a step, name of an axis in the signature of its member).
Axis = tuple[int, str]


@dataclass(frozen=True)
class EnsemblePlan:
    """The plan of an ensemble.

    signature: the signature of the ensemble.
    levels: groups of indices of steps that can run at the same time, in the order of execution.
    inputs: for each step, the ensemble's name of the tensor that each input of the member reads.
    outputs: for each step, the ensemble's name of the tensor that each output of the member becomes.
    """

    signature: BundleSignature
    levels: Sequence[Sequence[int]]
    inputs: Sequence[Mapping[str, str]]
    outputs: Sequence[Mapping[str, str]]


def plan_ensemble(settings: EnsembleSettings, members: Sequence[BundleSignature]) -> EnsemblePlan:
    """Plans an ensemble.

    Args:
        settings: the settings of the ensemble.
        members: the signature of each step's member.

    Raises:
        BadInput: a member lacks a name, two steps write one tensor, types or shapes differ, or steps form a cycle.
    """
    inputs = [_inputs(i, step, of) for i, (step, of) in enumerate(zip(settings.steps, members, strict=True))]
    outputs = [_outputs(i, step, of) for i, (step, of) in enumerate(zip(settings.steps, members, strict=True))]
    writers: dict[str, int] = {}
    for i, names in enumerate(outputs):
        for tensor in names.values():
            if tensor in writers:
                raise BadInput(f"`{tensor}` is written by {_step(settings, writers[tensor])} and by {_step(settings, i)}")
            writers[tensor] = i
    read = {tensor for names in inputs for tensor in names.values()}
    results = settings.outputs or tuple(tensor for tensor in writers if tensor not in read)
    if unknown := [tensor for tensor in results if tensor not in writers]:
        raise BadInput(f"no step writes the output `{unknown[0]}`", hint=nearest(unknown[0], list(writers)))
    levels = _levels(settings, inputs, writers)
    axes = _Axes()
    specs = _tensors(settings, members, inputs, outputs, axes)
    axis_names = axes.names(members)
    signature = BundleSignature(
        description="; ".join(step.model for step in settings.steps),
        inputs=[_renamed(specs[tensor], tensor, axis_names) for tensor in specs if tensor not in writers],
        outputs=[_renamed(specs[tensor], tensor, axis_names) for tensor in results],
        programs=[],
        weights=[],
        padding=sorted(_padding(members, axis_names)),
        limits=_limits(members, axis_names),
    )
    return EnsemblePlan(signature, levels, inputs, outputs)


def _step(settings: EnsembleSettings, i: int) -> str:
    return f"step {i + 1} (`{settings.steps[i].model}`)"


def member_inputs(of: BundleSignature) -> dict[str, TensorSignature]:
    """Returns all inputs of a signature by name, including texts."""
    specs = {spec.name: spec for spec in of.inputs}
    for step in of.preprocess:
        specs |= {name: TensorSignature(name=name, shape=specs[step.results[0]].shape[:1], dtype=TEXTS) for name in step.texts}
    return specs


def member_outputs(of: BundleSignature) -> dict[str, TensorSignature]:
    specs = {spec.name: spec for spec in of.outputs}
    for step in of.postprocess:
        if isinstance(step, DetokenizeStep):
            specs[step.output] = TensorSignature(name=step.output, shape=specs[step.tokens].shape[:1], dtype=TEXTS)
        elif isinstance(step, LabelsStep):
            specs[step.output] = TensorSignature(name=step.output, shape=specs[step.scores].shape[:1], dtype=TEXTS)
        elif isinstance(step, ProbabilitiesStep):
            specs[step.output] = specs[step.scores].model_copy(update={"name": step.output, "description": "probabilities"})
    return specs


def _inputs(i: int, step: EnsembleStep, of: BundleSignature) -> dict[str, str]:
    """Returns the tensors that a step reads, by the input names of its member. Required inputs that the map lacks keep their names."""
    specs = member_inputs(of)
    if unknown := [name for name in step.input_map if name not in specs]:
        raise BadInput(f"step {i + 1}: `{step.model}` has no input `{unknown[0]}`", hint=nearest(unknown[0], list(specs)))
    tensors = dict(step.input_map)
    sources = {}
    for text in of.preprocess:
        sources |= dict.fromkeys(text.results, text.input)
        if text.results[0] not in tensors:
            tensors.setdefault(text.input, text.input)
        elif text.input in tensors:
            raise BadInput(f"step {i + 1}: `{step.model}` makes `{text.results[0]}` of `{text.input}`: map one of them")
    for spec in of.inputs:
        if spec.default is None and sources.get(spec.name) not in tensors:
            tensors.setdefault(spec.name, spec.name)
    return tensors


def _outputs(i: int, step: EnsembleStep, of: BundleSignature) -> dict[str, str]:
    """Returns the tensors that a step writes, by the output names of its member. Without a map all outputs keep their names. With a
    map, outputs that it lacks are dropped."""
    specs = member_outputs(of)
    if unknown := [name for name in step.output_map if name not in specs]:
        raise BadInput(f"step {i + 1}: `{step.model}` has no output `{unknown[0]}`", hint=nearest(unknown[0], list(specs)))
    return dict(step.output_map) or {name: name for name in specs}


def _levels(settings: EnsembleSettings, inputs: Sequence[Mapping[str, str]], writers: Mapping[str, int]) -> list[list[int]]:
    """Groups steps in an order in which every tensor is written before it is read."""
    waits = [{writers[tensor] for tensor in names.values() if tensor in writers} for names in inputs]
    done: set[int] = set()
    levels = []
    while len(done) < len(waits):
        level = [i for i, others in enumerate(waits) if i not in done and others <= done]
        if not level:
            unordered = ", ".join(_step(settings, i) for i in range(len(waits)) if i not in done)
            raise BadInput(f"a circle of steps: each of {unordered} reads what another of them writes")
        levels.append(level)
        done |= set(level)
    return levels


def _tensors(
    settings: EnsembleSettings,
    members: Sequence[BundleSignature],
    inputs: Sequence[Mapping[str, str]],
    outputs: Sequence[Mapping[str, str]],
    axes: "_Axes",
) -> dict[str, tuple[int, TensorSignature]]:
    """Returns (step, description) of each tensor, as the first step that has the tensor describes it, after a check that other steps
    agree."""
    tensors: dict[str, tuple[int, TensorSignature]] = {}
    for i, of in enumerate(members):
        for specs, names in ((member_inputs(of), inputs[i]), (member_outputs(of), outputs[i])):
            for name, tensor in names.items():
                first, spec = tensors.setdefault(tensor, (i, specs[name]))
                if spec.dtype != specs[name].dtype:
                    kinds = f"{spec.dtype} in {_step(settings, first)} and {specs[name].dtype} in {_step(settings, i)}"
                    raise BadInput(f"`{tensor}` is {kinds}")
                if not axes.joined(first, spec, i, specs[name]):
                    shapes = f"{shape_text(spec)} in {_step(settings, first)} and {shape_text(specs[name])} in {_step(settings, i)}"
                    raise BadInput(f"`{tensor}` is {shapes}")
    return tensors


@dataclass
class _Axes:
    """The sets of axes that must be equal (a union-find). `sizes`: the fixed sizes of sets, by root."""

    parents: dict[Axis, Axis] = field(default_factory=dict)
    sizes: dict[Axis, int] = field(default_factory=dict)

    def root(self, axis: Axis) -> Axis:
        while (parent := self.parents.setdefault(axis, axis)) != axis:
            axis = parent
        return axis

    def joined(self, i: int, first: TensorSignature, k: int, second: TensorSignature) -> bool:
        """Unifies the axes of two shapes. Returns False if that is impossible."""
        if len(first.shape) != len(second.shape):
            return False
        return all(self._same((i, a), (k, b)) for a, b in zip(first.shape, second.shape, strict=True))

    def _same(self, first: tuple[int, int | str], second: tuple[int, int | str]) -> bool:
        roots, sizes = [], []
        for step, name in (first, second):
            if isinstance(name, str):
                root = self.root((step, name))
                roots.append(root)
                sizes += [self.sizes[root]] if root in self.sizes else []
            else:
                sizes.append(name)
        if len(set(sizes)) > 1:
            return False
        for root in roots:
            self.parents[root] = roots[0]
        if roots and sizes:
            self.sizes[roots[0]] = sizes[0]
        return True

    def names(self, members: Sequence[BundleSignature]) -> dict[Axis, int | str]:
        """Returns the ensemble's name, or the fixed size, of every axis of a member."""
        axis_names: dict[Axis, int | str] = {}
        of_root: dict[Axis, int | str] = {}
        for i, of in enumerate(members):
            for spec in (*of.inputs, *of.outputs):
                for name in spec.shape:
                    if isinstance(name, str):
                        root = self.root((i, name))
                        if root not in of_root:
                            fresh = name if name not in of_root.values() else f"{name}_{i + 1}"
                            of_root[root] = self.sizes.get(root, fresh)
                        axis_names[i, name] = of_root[root]
        return axis_names


def _renamed(spec: tuple[int, TensorSignature], name: str, axis_names: Mapping[Axis, int | str]) -> TensorSignature:
    i, first = spec
    shape = [axis_names[i, size] if isinstance(size, str) else size for size in first.shape]
    return first.model_copy(update={"name": name, "shape": shape, "default": None})


def _padding(members: Sequence[BundleSignature], axis_names: Mapping[Axis, int | str]) -> set[str]:
    """Returns the axes that are the batch axis of every member."""
    batches = [batch_axis(of) for of in members]
    batch_names = {axis_names[i, axis] for i, axis in enumerate(batches) if axis is not None}
    return {name for name in batch_names if isinstance(name, str)} if len(batch_names) == 1 and None not in batches else set()


def _limits(members: Sequence[BundleSignature], axis_names: Mapping[Axis, int | str]) -> dict[str, int]:
    limits: dict[str, int] = {}
    for i, of in enumerate(members):
        for axis, limit in of.limits.items():
            name = axis_names.get((i, axis))
            if isinstance(name, str):
                limits[name] = min(limit, limits.get(name, limit))
    return limits
