"""Packs the weights of a model into panels, for the small matrix products of decoding on a CPU (`ops.native.products`).

A serving engine is the only user of its model, so it replaces each weight by its panels, and memory holds the weight once. Elsewhere
panels are a copy, made only if it takes at most a quarter of the free memory. Weights that were kept in the quantized blocks of a GGUF
file may be packed already. Quantized weights of any format are packed as their codes. Their original scales, which are small, are kept
too.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from argosy.adapt.formats.activations import Activations
from argosy.adapt.quant import PARTS, QuantizedEinsum
from argosy.core.errors import BadInput
from argosy.models.parts.einsum import Einsum
from argosy.models.parts.weight import Leaves, variables
from argosy.observe.environment import memory_bytes
from argosy.ops.native import library
from argosy.ops.native.blocks import packed_experts, packed_quantized
from argosy.ops.native.products import SMALLEST, Panels, pack_panels
from argosy.weights.gguf.blocks import BlockRows, Origin

# The fewest activations that share a scale, as in a block of llama.cpp.
SHARED = 32
# The largest share of the free memory that a copy may take.
SHARE = 0.25

# Replaces a weight by its panels: (parameter name, panels).
ReplaceWeight = Callable[[str, Panels], None]


class PanelPacker:
    """Packs the weights of one model.

    Args:
        model: the model, with unrolled layers.
        replace: called with each packed weight, to replace the weight itself; None: the packed weights are copies.
        origin: the quantized blocks of the GGUF file that weights were read from, which are packed in place of the weights.
        activations: the number format to which activations are rounded before products with integer weights; None: as each weight's own
            scheme says.

    panels: the packed weights, by parameter name.
    """

    def __init__(
        self,
        model: nnx.Module,
        replace: ReplaceWeight | None = None,
        origin: Origin | None = None,
        activations: str | None = None,
    ):
        self.forms, self.replace, self.origin, self.activations = panel_forms(model), replace, origin, activations
        quantized = ((path, of) for path, of in nnx.iter_modules(model) if isinstance(of, QuantizedEinsum))
        self.quantized = {".".join(map(str, (*path, "values"))): of for path, of in quantized}
        # The packed weights, by parameter name.
        self.panels: Leaves = {}

    def of(self, weights: Leaves) -> Leaves:
        """Returns the weights, packed where that makes products faster. Further calls return the same panels until `forget`. Weights
        that get packed are removed from `weights`.

        Raises:
            BadInput: activations are to be rounded, but no packed weight supports it.
        """
        if not self.panels:
            forms = {at: form for at, form in self.forms.items() if is_packable(weights.get(at), at in self.quantized)}
            rows = {} if self.origin is None else self._rows(self.origin, weights, forms)
            if self.replace is None and not has_memory_for([rows.get(address, weights[address]) for address in forms]):
                forms = {}
            for address, form in forms.items():
                if (panels := self._packed(address, weights, rows.get(address), form)) is None:
                    continue
                del weights[address]
                self.panels[address] = panels
                if self.replace is not None:
                    self.replace(address, panels)
        weights = weights | self.panels
        if self.activations is None:
            return weights
        if not any(map(has_whole_numbers, weights.values())):
            problem = f"engine.activations={self.activations}: no weight is packed as whole numbers, so no data would be rounded"
            raise BadInput(problem, hint="packing needs free memory for a copy of the weights; or leave it out")
        return {at: rounding_data(w, self.activations) for at, w in weights.items()}

    def _packed(self, address: str, weights: Leaves, rows: BlockRows | None, form: tuple[int, bool]) -> Panels | None:
        """Packs a weight into panels; None if there is no kernel for its codes."""
        if (of := self.quantized.get(address)) is not None:
            name, pack = address.removesuffix("values"), packed_experts if of.group else packed_quantized
            return pack(of.with_parts({part: weights.get(f"{name}{part}") for part in PARTS}), *form)
        return pack_panels(weights[address], *form) if rows is None else rows.packed(weights[address])

    @staticmethod
    def _rows(origin: Origin, weights: Leaves, forms: Mapping[str, tuple[int, bool]]) -> dict[str, BlockRows]:
        """The blocks of the file, for those weights that it has in blocks, by parameter name."""
        blocks = {address: origin.rows(address, weights[address], *form) for address, form in forms.items()}
        return {address: rows for address, rows in blocks.items() if rows is not None}

    def forget(self) -> None:
        """Frees the packed weights, because the weights have changed."""
        self.panels = {}


def packer_of(model: Any, *options: Any) -> PanelPacker | None:
    """The packer of a model's weights; None if the model does not compute in float32, or there are no kernels for packed weights.

    Args:
        options: of `PanelPacker`.
    """
    return None if model.dtype != jnp.float32 or library.unavailable() else PanelPacker(model, *options)


def rounding_data(w: Any, format: str) -> Any:
    """Sets the number format to which a weight's products round their activations, if the weight is packed integers. Returns the
    weight."""
    if not has_whole_numbers(w):
        return w
    return replace(w, activations=Activations(format, max(w.summed // w.scale.shape[1], SHARED)))


def has_whole_numbers(w: Any) -> bool:
    """Whether a weight is packed integers."""
    return isinstance(w, Panels) and w.scale is not None and w.code.numbers == "whole"


def check_rounds_data(model: Any, weights: Leaves, origin: Origin | None) -> None:
    """Checks that a model has integer weights, for whose products an engine can round activations.

    Raises:
        BadInput: the model does not compute in float32, there are no kernels, or it has no integer weight.
    """
    setting = "engine.activations"
    if why := library.unavailable() or ("" if model.dtype == jnp.float32 else f"the model computes in {jnp.dtype(model.dtype)}"):
        raise BadInput(f"{setting} is for products in compiled kernels: {why}", hint="leave it out")
    quantized = (of.scheme.format.is_integer for _, of in nnx.iter_modules(model) if isinstance(of, QuantizedEinsum))
    if origin is None and not any(map(has_whole_numbers, weights.values())) and not any(quantized):
        hint = "load a GGUF file that is in blocks, or quantization=w8 or w4"
        raise BadInput(f"{setting}: no weight of this model is whole numbers, so no data would be rounded", hint=hint)


def panel_forms(model: nnx.Module, *, in_blocks: bool = False) -> dict[str, tuple[int, bool]]:
    """The weights that can be packed, by parameter name, each with (inner, first) as in `Panels`.

    An embedding is packed for its use as a head, if there is no other head. Experts are packed only if they are quantized, each as a
    separate matrix. Weights that several equations contract (latent attention) are not packed.

    Args:
        in_blocks: whether to return the weights that may stay in a file's blocks, which include an embedding besides a head, and
            experts that are not quantized here.
    """
    out: dict[str, tuple[int, bool]] = {}
    for path, node in nnx.iter_modules(model):
        if not isinstance(node, Einsum | QuantizedEinsum) or node.stacked or node.several:
            continue
        if node.group and ((isinstance(node, Einsum) and not in_blocks) or not node.spec.startswith(node.group)):
            continue
        summed = node.inner
        if node.is_lookup:
            if node is not getattr(model, "embed", None) or (getattr(model, "head", None) is not None and not in_blocks):
                continue
            summed = node.kept
        spec = node.spec.removeprefix(node.group)
        rest = "".join(letter for letter in spec if letter not in summed)
        if summed and rest and spec in (summed + rest, rest + summed):
            leaf = "w" if isinstance(node, Einsum) else "values"
            out[".".join(map(str, (*path, leaf)))] = len(summed), spec.startswith(summed)
    return out


def block_forms(model: nnx.Module) -> dict[str, tuple[int, bool, bool]]:
    """The weights that may stay in a file's blocks, by parameter name, each with (inner, first, has_experts) as `BlockedWeights.of`
    takes them. They include an embedding besides a head, because looking up rows works in blocks too."""
    weights = {address: (v, v.get_metadata()["meaning"]) for address, v in variables(model).items()}
    forms = panel_forms(model, in_blocks=True).items()
    return {
        address: (*form, bool(weights[address][1].group)) for address, form in forms if math.prod(weights[address][0].shape) >= SMALLEST
    }


def count_in_blocks(weights: Leaves) -> tuple[int, int]:
    """The number of weights that are packed as codes, either from a file's blocks or quantized here, and their total bytes."""
    panels = [a for a in weights.values() if isinstance(a, Panels) and a.scale is not None]
    return len(panels), sum(a.nbytes for a in panels)


def is_packable(w: Any, is_quantized: bool = False) -> bool:
    """Whether a weight can be packed, and is large enough for that.

    Args:
        is_quantized: whether the array has codes, up to four in a byte.
    """
    if not isinstance(w, jax.Array):
        return False
    return 4 * w.size >= SMALLEST if is_quantized else w.dtype in (jnp.float32, jnp.bfloat16) and w.size >= SMALLEST


def has_memory_for(weights: Any) -> bool:
    """Whether there is memory for a copy of these weights, which are arrays or `BlockRows`."""
    free = memory_bytes()[1]
    return free is not None and sum(a.nbytes for a in weights) <= SHARE * free
