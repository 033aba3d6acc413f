"""The weights of a model, packed for the small products of decoding on a CPU (`ops.native.products`).

A serving engine is the only user of its model, so there each weight is packed in place, and memory holds it once. Elsewhere packed
weights are a copy, made only if it takes at most a quarter of the free memory. Weights that a GGUF file has in blocks may come packed.
Quantized weights are packed as their codes, whatever the format. Their scales, which are small, stay beside them, too.
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

# The fewest numbers of data that share a scale: llama.cpp's block.
SHARED = 32
# The most of the free memory that a copy may take.
SHARE = 0.25

# Takes the place of a weight, by address.
ReplaceWeight = Callable[[str, Panels], None]


class PanelPacker:
    """The packed weights of one model.

    Args:
        model: unrolled.
        replace: called with each packed weight, so that nothing else need hold the weight itself; None: they are copies.
        origin: the blocks that weights were read from, which are packed in their place.
        activations: the number format to which data of products with whole numbers is rounded; None: as the weights say.
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
        # The packed weights, by address.
        self.panels: Leaves = {}

    def of(self, weights: Leaves) -> Leaves:
        """The weights, packed where that makes products faster; the same arrays until `forget`. Packed weights are removed from
        `weights`.

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
        """A weight in panels; None for codes that have no kernel."""
        if (of := self.quantized.get(address)) is not None:
            name, pack = address.removesuffix("values"), packed_experts if of.group else packed_quantized
            return pack(of.with_parts({part: weights.get(f"{name}{part}") for part in PARTS}), *form)
        return pack_panels(weights[address], *form) if rows is None else rows.packed(weights[address])

    @staticmethod
    def _rows(origin: Origin, weights: Leaves, forms: Mapping[str, tuple[int, bool]]) -> dict[str, BlockRows]:
        """The blocks of a file, for those of these weights that it has in blocks."""
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
    """A weight, which rounds the data of its products to this format if it is packed whole numbers."""
    if not has_whole_numbers(w):
        return w
    return replace(w, activations=Activations(format, max(w.summed // w.scale.shape[1], SHARED)))


def has_whole_numbers(w: Any) -> bool:
    """Whether a weight is packed whole numbers."""
    return isinstance(w, Panels) and w.scale is not None and w.code.numbers == "whole"


def check_rounds_data(model: Any, weights: Leaves, origin: Origin | None) -> None:
    """Checks that a model has weights whose data an engine can round.

    Raises:
        BadInput: it computes in another type, there are no kernels, or no weight is whole numbers.
    """
    setting = "engine.activations"
    if why := library.unavailable() or ("" if model.dtype == jnp.float32 else f"the model computes in {jnp.dtype(model.dtype)}"):
        raise BadInput(f"{setting} is for products in compiled kernels: {why}", hint="leave it out")
    quantized = (of.scheme.format.is_integer for _, of in nnx.iter_modules(model) if isinstance(of, QuantizedEinsum))
    if origin is None and not any(map(has_whole_numbers, weights.values())) and not any(quantized):
        hint = "load a GGUF file that is in blocks, or quantization=w8 or w4"
        raise BadInput(f"{setting}: no weight of this model is whole numbers, so no data would be rounded", hint=hint)


def panel_forms(model: nnx.Module, *, in_blocks: bool = False) -> dict[str, tuple[int, bool]]:
    """`{address of a weight: (inner, first)}`, as in `Panels`, of the weights that are matrices of a product.

    An embedding is packed for its use as a head, if there is no other head. Experts are packed as codes alone, each as a matrix of its
    own. What several equations contract (latent attention) is not packed.

    Args:
        in_blocks: what stays in a file's blocks: an embedding beside a head and experts of floats too.
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
    """`{address: (inner, first, has_experts)}` of weights that stay in a file's blocks, as `BlockedWeights.of` takes them. An embedding
    beside a head is only looked up, for which blocks do too."""
    weights = {address: (v, v.get_metadata()["meaning"]) for address, v in variables(model).items()}
    forms = panel_forms(model, in_blocks=True).items()
    return {
        address: (*form, bool(weights[address][1].group)) for address, form in forms if math.prod(weights[address][0].shape) >= SMALLEST
    }


def count_in_blocks(weights: Leaves) -> tuple[int, int]:
    """The number of weights that are packed as codes, from a file's blocks or quantized, and their bytes."""
    panels = [a for a in weights.values() if isinstance(a, Panels) and a.scale is not None]
    return len(panels), sum(a.nbytes for a in panels)


def is_packable(w: Any, is_quantized: bool = False) -> bool:
    """Whether packing a weight is worth it, and possible.

    Args:
        is_quantized: the array has its codes, of which a byte may have four.
    """
    if not isinstance(w, jax.Array):
        return False
    return 4 * w.size >= SMALLEST if is_quantized else w.dtype in (jnp.float32, jnp.bfloat16) and w.size >= SMALLEST


def has_memory_for(weights: Any) -> bool:
    """Whether there is memory for a copy of these weights, each an array or `BlockRows`."""
    free = memory_bytes()[1]
    return free is not None and sum(a.nbytes for a in weights) <= SHARE * free
