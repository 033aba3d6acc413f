"""Merges low-rank adapters of image models, as diffusers and kohya's trainer write them, into tensors while these are read.

    W' = W + alpha / r  B A        Hu et al. 2021 (arXiv:2106.09685)

diffusers names the factors `transformer.NAME.lora_A.weight` and `.lora_B.weight`, also under `unet.` and `text_encoder.`. The metadata
of the file give alpha, otherwise alpha = r. kohya names them `lora_unet_NAME.lora_down.weight`, `.lora_up.weight` and `.alpha`. Its
NAME is that of diffusers with underscores for dots, as for Stable Diffusion 1 and 2.
"""

import json
from collections.abc import KeysView, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from argosy.core.counts import plural
from argosy.core.errors import BadInput, some
from argosy.core.formats import TensorReader
from argosy.core.formats.safetensors import SafeTensors

FILE = "pytorch_lora_weights.safetensors"
# The prefixes of kohya's names, and the pipeline folders of the models that each may adapt.
KOHYA = {
    "lora_unet_": ("unet", "transformer"),
    "lora_te_": ("text_encoder",),
    "lora_te1_": ("text_encoder",),
    "lora_te2_": ("text_encoder_2",),
}
ENDS = {".lora_A.weight": "down", ".lora_B.weight": "up", ".lora_down.weight": "down", ".lora_up.weight": "up", ".alpha": "alpha"}


@dataclass(frozen=True)
class LowRankUpdate:
    """The update of one weight: scale * up @ down is added to it.

    down: the factor A, [r in ...]. That of a convolution has the kernel's axes last.
    up: the factor B, [out r ...].
    """

    down: np.ndarray
    up: np.ndarray
    scale: float

    def added(self, weight: np.ndarray) -> np.ndarray:
        """Returns the weight plus the update, in the type of the weight."""
        rank = len(self.down)
        product = self.up.reshape(-1, rank).astype(np.float32) @ self.down.reshape(rank, -1).astype(np.float32)
        return (weight.astype(np.float32) + self.scale * product.reshape(weight.shape)).astype(weight.dtype)


class UpdatedTensors:
    """A reader of another reader's tensors that adds the updates, {tensor name: update}, when tensors are read."""

    def __init__(self, of: TensorReader, updates: Mapping[str, LowRankUpdate]):
        self.of, self.updates = of, updates

    @property
    def names(self) -> KeysView[str]:
        return dict.fromkeys(self.of.names).keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.of.shape(name)

    def dtype(self, name: str) -> np.dtype:
        return self.of.dtype(name)

    def read(self, name: str) -> np.ndarray:
        weight = self.of.read(name)
        return self.updates[name].added(weight) if name in self.updates else weight


def image_updates(path: str | Path, weights: Mapping[str, TensorReader]) -> dict[str, dict[str, LowRankUpdate]]:
    """Reads the updates of a file of adapters, {model of the pipeline: {tensor name: update}}.

    Args:
        path: a .safetensors file, or a folder with `pytorch_lora_weights.safetensors`.
        weights: the tensors of each model of the pipeline (`unet`, `text_encoder`, ...), under their names in its files.

    Raises:
        BadInput: a name fits no tensor of the pipeline, a factor lacks the other, or shapes do not fit.
    """
    path = Path(path)
    file = SafeTensors.open(path / FILE if path.is_dir() else path)
    by_tensor: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    unknown = []
    for name in file.names:
        end = next((end for end in ENDS if name.endswith(end)), None)
        place = None if end is None else _place(name.removesuffix(end), weights)
        if end is None or place is None:
            unknown.append(name)
        else:
            by_tensor.setdefault(place, {})[ENDS[end]] = file.read(name)
    if unknown:
        hint = "names of diffusers (transformer., unet., text_encoder.) and of kohya's trainer for Stable Diffusion 1 and 2 are read"
        many = plural(len(unknown), "tensor fits", "tensors fit")
        raise BadInput(f"{many} no weight of this pipeline: {some(unknown)}", where=str(path), hint=hint)
    metadata = json.loads(file.metadata.get("lora_adapter_metadata") or "{}")
    out: dict[str, dict[str, LowRankUpdate]] = {}
    for (part, tensor), factors in by_tensor.items():
        if not {"down", "up"} <= factors.keys():
            raise BadInput(f"{part}/{tensor}: only one of the two factors of its adapter is there", where=str(path))
        down, up = factors["down"], factors["up"]
        shape, rank = weights[part].shape(tensor), len(down)
        if (up.shape[0], up.shape[1], down[0].size) != (shape[0], rank, int(np.prod(shape[1:]))):
            raise BadInput(f"{part}/{tensor} is {list(shape)}, and its adapter {list(up.shape)} x {list(down.shape)}", where=str(path))
        alpha = float(factors["alpha"].reshape(-1)[0]) if "alpha" in factors else _alpha(metadata, part, tensor, rank)
        out.setdefault(part, {})[tensor] = LowRankUpdate(down, up, alpha / rank)
    return out


def _place(name: str, weights: Mapping[str, TensorReader]) -> tuple[str, str] | None:
    """Returns the model of the pipeline and the tensor that an adapter's name stands for; None if there is no such tensor."""
    for start, parts in KOHYA.items():
        if name.startswith(start):
            flat = name.removeprefix(start).removeprefix("text_model_")
            for part in parts:
                for tensor in weights[part].names if part in weights else ():
                    if tensor.removeprefix("text_model.").replace(".", "_") == f"{flat}_weight":
                        return part, tensor
            return None
    part, _, rest = name.partition(".")
    if part not in weights:
        part, rest = "transformer" if "transformer" in weights else "unet", name
    for tensor in (f"{rest}.weight", f"text_model.{rest}.weight", f"{rest.removeprefix('text_model.')}.weight"):
        if tensor in weights[part].names:
            return part, tensor
    return None


def _alpha(metadata: Mapping[str, Any], part: str, tensor: str, rank: int) -> float:
    """Returns alpha from the metadata that diffusers writes; the rank where they have none."""
    patterns = metadata.get(f"{part}.alpha_pattern") or {}
    module = tensor.removesuffix(".weight")
    match = next((alpha for name, alpha in patterns.items() if module == name or module.endswith(f".{name}")), None)
    return float(match if match is not None else metadata.get(f"{part}.lora_alpha", rank))
