"""Exports models as bundles: `argosy export MODEL OUT`, and `lm.export(OUT)`."""

import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export
from jax.sharding import NamedSharding

from argosy.core.errors import BadInput, Unsupported
from argosy.core.settings import dump
from argosy.export.lower import PLATFORMS, export_program, portable_implementations
from argosy.export.manifest import BundleManifest, BundleSignature, dtype_of_name
from argosy.export.mesh import ExportMesh, described_mesh
from argosy.export.signatures import BATCH, LENGTH, model_signature, split_program
from argosy.export.write import BundleContents, tensor_entry, write_bundle
from argosy.infer.embed import embeds
from argosy.infer.lm import LM
from argosy.models import FAMILIES
from argosy.models.parts.weight import logical, variables
from argosy.parallel.rules import DEFAULT, shardings

Say = Callable[[str], None]
# The permitted sizes of an axis. None permits any size.
Sizes = Sequence[int] | None


def export_model(
    lm: LM,
    target: str | Path,
    *,
    signature: str | Sequence[str] | None = None,
    platforms: Sequence[str] = PLATFORMS,
    batch: int | Sequence[int] | None = None,
    length: int | Sequence[int] | None = None,
    max_tokens: int | None = None,
    mesh: ExportMesh | Mapping[str, int] | None = None,
    lineage: Mapping[str, Any] | None = None,
    say: Say = lambda _: None,
    **options: Any,
) -> BundleManifest:
    """Writes a model as a bundle.

    Args:
        target: the path of the bundle, a new folder.
        signature: one or several of logits, embed, classify, generate, rank, user and item. The first becomes the default of the
            bundle. None selects rank for rankers, classify for models with a head of scores, embed for models that embed texts, and
            otherwise logits.
        platforms: the platforms that the programs run on: cpu, cuda, rocm, tpu.
        batch: the batch sizes. Each gets a program, and smaller batches are padded. None permits any size, compiled on first use.
        length: the sequence lengths, or for `generate` the lengths of prompts. Each gets a program. None permits any length.
        max_tokens: the limit of a completion in tokens, for `generate`.
        mesh: the sizes of the mesh that programs run on, such as {"tensor": 2}. Its devices need not exist. None is for one device.
        lineage: the origin of the model, for the manifest.
        say: called with progress messages.
        options: further arguments of `write_bundle`, such as `store` and `sign`.

    Raises:
        BadInput: the model has no such signature, a size is wrong, the mesh splits no weight or needs listed sizes, or the target
            exists. Nothing is written.
        Unsupported: the weights are in the blocks of a GGUF file, or a program cannot be portable.
    """
    if lm.in_blocks:
        problem = "weights in the blocks of a .gguf file are for kernels of this machine"
        raise Unsupported(problem, hint="load the model without `blocks`")
    default = "rank" if lm.config.inputs == "clicks" else "classify" if lm.config.scored else "embed" if embeds(lm) else "logits"
    names = [signature or default] if signature is None or isinstance(signature, str) else list(signature)
    if max_tokens is not None and "generate" not in names:
        raise BadInput("max_tokens is for signature=generate")
    contents = BundleContents({}, {}, lineage=model_lineage(lm) | dict(lineage or {}))
    contents.implementations = portable_implementations(platforms)
    places = weight_places(lm.module, mesh)
    for name in dict.fromkeys(names):
        lengths = listed_sizes("length", length)
        sizes = {} if name != "generate" else {"max_tokens": max_tokens, "prompt_tokens": max(lengths) if lengths else None}
        plan = model_signature(lm, name, **sizes)
        program, weights = split_program(lm.module, plan.function)
        lengths = lengths or ([plan.fixed[LENGTH]] if LENGTH in plan.fixed else None)
        bundle_signature = plan.signature
        if lengths is not None:
            check_lengths(lengths, bundle_signature.limits[LENGTH])
            bundle_signature = bundle_signature.model_copy(update={"limits": bundle_signature.limits | {LENGTH: max(lengths)}})
        say(f"lowering `{name}` for {', '.join(platforms)}")
        shapes = size_combinations({BATCH: listed_sizes("batch", batch), LENGTH: lengths})
        if places is not None:
            check_closed(lm.module, bundle_signature, shapes[0])
        lowering: dict[str, Any] = {"platforms": platforms, "places": places}
        contents.programs[name] = [
            (fixed, export_program(program, weights, abstract_inputs(bundle_signature, fixed), **lowering)) for fixed in shapes
        ]
        contents.signatures[name] = bundle_signature.model_copy(update={"weights": sorted(weights)})
        contents.weights = [tensor_entry(address, value) for address, value in weights.items()]
    if places is not None:
        contents.mesh = dict(next(iter(places.values())).mesh.shape)
        specs: dict[str, list[Any]] = {address: list(place.spec) for address, place in places.items()}
        contents.splits = {address: spec for address, spec in specs.items() if any(spec)}
    if lm.tokenizer is not None:
        contents.files = tokenizer_files(lm.tokenizer)
    return write_bundle(target, contents, **options)


def weight_places(module: Any, mesh: ExportMesh | Mapping[str, int] | None) -> dict[str, NamedSharding] | None:
    """Returns the sharding of each weight over a mesh of absent devices, by the rules of training and serving; None for one device.

    Raises:
        BadInput: the mesh splits no weight.
    """
    sizes = (mesh if isinstance(mesh, ExportMesh) else ExportMesh(**(mesh or {}))).sizes()
    if not sizes:
        return None
    shapes = {address: value.shape for address, value in variables(module).items()}
    places = shardings(logical(module), shapes, DEFAULT, described_mesh(sizes))
    used = {axis for place in places.values() for axis in place.spec}
    if unused := [axis for axis in sizes if axis not in used]:
        problem = f"mesh.{unused[0]} = {sizes[unused[0]]} divides no weight of this model"
        raise BadInput(problem, hint="a number that divides its heads, its feed-forward features or its width, such as a power of two")
    return places


def check_closed(module: Any, signature: BundleSignature, fixed: Mapping[str, int]) -> None:
    """Refuses open sizes in a program for several devices if the model has experts, because jaxlib 0.10.2 crashes when it refines them.

    Raises:
        BadInput: a size is left open in a model with experts.
    """
    opened = {size for spec in signature.inputs for size in spec.shape if isinstance(size, str) and size not in fixed}
    if opened and any("experts" in axes for axes in logical(module).values()):
        problem = f"{' and '.join(sorted(opened))} left open, in a model with experts on several devices"
        raise BadInput(problem, hint="list the sizes: batch=1,4 length=128")


def listed_sizes(name: str, sizes: int | Sequence[int] | None) -> list[int] | None:
    """Returns the permitted sizes of an axis in ascending order; None permits any size.

    Raises:
        BadInput: a size is below 1, or the list is empty.
    """
    if sizes is None:
        return None
    sorted_sizes = sorted({sizes} if isinstance(sizes, int) else set(sizes))
    if not sorted_sizes or sorted_sizes[0] < 1:
        raise BadInput(f"{name} = {sizes}", hint=f"sizes of at least 1, such as {name}=1,4,16; or {name}=symbolic for any")
    return sorted_sizes


def check_lengths(lengths: Sequence[int], most: int) -> None:
    """Checks that sequences of these lengths fit.

    Raises:
        BadInput: a length exceeds `most`.
    """
    if max(lengths) > most:
        raise BadInput(f"length = {max(lengths)} is more than this signature's {most} tokens")


def size_combinations(sizes: Mapping[str, Sequence[int] | None]) -> list[dict[str, int]]:
    """Returns every combination of the listed sizes. Axes without a list stay open."""
    listed = {name: some for name, some in sizes.items() if some is not None}
    return [dict(zip(listed, values)) for values in itertools.product(*listed.values())]


def abstract_inputs(signature: BundleSignature, fixed: Mapping[str, int]) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and types of a signature's inputs. Axes that are not fixed get symbolic sizes."""
    names = {size: None for spec in signature.inputs for size in spec.shape if isinstance(size, str) and size not in fixed}
    opened = dict(zip(names, export.symbolic_shape(", ".join(names)))) if names else {}
    sizes = {**fixed, **opened}
    return {
        spec.name: jax.ShapeDtypeStruct(
            tuple(sizes[size] if isinstance(size, str) else size for size in spec.shape), dtype_of_name(spec.dtype)
        )
        for spec in signature.inputs
    }


def tokenizer_files(tokenizer: Any, folder: str = "tokenizer") -> dict[str, bytes]:
    """Returns the files of a tokenizer, by path in the bundle.

    Args:
        folder: the folder of the files in the bundle.
    """
    with tempfile.TemporaryDirectory() as place:
        tokenizer.save(place)
        root = Path(place)
        return {f"{folder}/{path.relative_to(root)}": path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def model_lineage(lm: LM) -> dict[str, Any]:
    """Returns the description of a model for a manifest: its family, settings, size and type."""
    family = next((name for name in FAMILIES if FAMILIES[name] is type(lm.config)), type(lm.config).__name__)
    about = {"family": family, "parameters": lm.config.parameters(), "dtype": str(np.dtype(lm.module.dtype))}
    return {"model": about | {"config": dump(lm.config)}}


