"""Adapters on a base model: the base's weights with the adapters merged as they are read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from argosy.adapt.quant import QuantizedEinsum
from argosy.adapt.settings import Lora, LowRank
from argosy.adapt.surgery import find
from argosy.core.addresses import is_hub
from argosy.core.errors import BadInput
from argosy.core.formats import Arrays, OverlaidTensors, TensorReader, TensorView
from argosy.core.hub.names import HubName, name_of_path
from argosy.data.tokenizers.load import matching
from argosy.models.parts.einsum import Contraction
from argosy.models.parts.stack import Unroll
from argosy.weights.hub.config import read_json_object
from argosy.weights.model import COMPANIONS, OpenedModel
from argosy.weights.peft.merge import with_adapter
from argosy.weights.peft.reader import check_base, config_for, read_contents
from argosy.weights.peft.sites import CONFIG, Adapter, PeftContents, contractions


@dataclass(frozen=True)
class AdaptedModel:
    """Adapters and their base model.

    settings: the `adapter` settings of the run that trained the adapters.
    base: the base model, without the adapters merged in.
    config: the config of the model with adapters.
    read: reads the low-rank factors and the weights that were trained in full.
    lock: keeps retention from removing the checkpoint while this object exists.
    """

    settings: LowRank
    base: OpenedModel
    config: Any
    read: Callable[[], PeftContents]
    lock: Any = None

    @cached_property
    def contents(self) -> PeftContents:
        """The low-rank factors and the weights that were trained in full, read at the first use.

        Raises:
            Damaged: a factor or a weight is missing.
        """
        return self.read()

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The low-rank factors, by the per-layer name of the contraction that they adapt."""
        return self.contents.adapters

    @property
    def whole(self) -> Mapping[str, np.ndarray]:
        """The weights that were trained in full, by per-layer name."""
        return self.contents.whole

    @property
    def weights(self) -> TensorReader:
        """Reads the base's weights with the adapters merged into them, in the types of the base. A base that was quantized for
        training is rounded as in training, because the adapters have learned to compensate for the rounding."""
        return OverlaidTensors(TensorView(self.base.weights, change=self._merged), Arrays(self.whole))

    @property
    def is_quantized(self) -> bool:
        """Whether the base was quantized for training."""
        return any(isinstance(of, QuantizedEinsum) for of in self._contractions.values())

    def with_base(self, base: OpenedModel) -> "AdaptedModel":
        """Returns the same adapters on `base`, which is the same base model opened differently."""
        return replace(self, base=base)

    @cached_property
    def _contractions(self) -> dict[str, Contraction]:
        model = self.config.build(Unroll())
        self.settings.quantize(model)
        return find(model, ".*")

    def _merged(self, name: str, read: Callable[[], np.ndarray], part: int | None) -> np.ndarray:
        module, _, leaf = name.rpartition(".")
        of = self._contractions.get(module) if leaf == "w" else None
        if of is None or (module not in self.adapters and not isinstance(of, QuantizedEinsum)):
            return read()
        array = read() if part is None else read()[None]
        if isinstance(of, QuantizedEinsum):
            array = np.asarray(of.codes(array).dequantized(array.dtype))
        if module in self.adapters:
            array = with_adapter(of, self.adapters[module], array, part or 0)
        return array if part is None else array[0]


def peft_base(folder: Path) -> str:
    """The path or name of the base model that a PEFT folder names.

    Raises:
        BadInput: the base is not on this machine, and nothing says that it is on the Hub.
    """
    keys = read_json_object(folder / CONFIG)
    name = keys.get("base_model_name_or_path")
    if name and not Path(str(name)).exists() and (is_hub(name) or name_of_path(folder) or keys.get("revision")):
        # Adapters from the Hub name their base by its name there.
        revision = keys.get("revision")
        return str(HubName.parse(str(name)) if is_hub(name) else HubName(str(name), revision))
    if not name or not Path(str(name)).exists():
        hint = f'argosy.load(MODEL, adapter="{folder}") names it; or write its folder as base_model_name_or_path'
        raise BadInput(f"the base model of these adapters, {name}, is not on this machine", where=str(folder / CONFIG), hint=hint)
    return str(name)


def open_peft(folder: Path, base: OpenedModel) -> OpenedModel:
    """Opens a PEFT folder as a model: the base, whose weights are merged with the adapters when they are read.

    Raises:
        BadInput: the base has adapters itself, or an error of `read_contents`.
        Unsupported: an error of `read_contents`.
    """
    if base.adapted is not None:
        # They were trained on merged weights.
        problem = f"the base of these adapters, {base.path}, has adapters itself"
        hint = f"argosy convert {base.path} FOLDER merges those: name that folder as the base"
        raise BadInput(problem, where=str(folder / CONFIG), hint=hint)
    config = config_for(folder, base.config)

    def read() -> PeftContents:
        contents = read_contents(folder, config)
        check_base(contents, base.weights)
        return contents

    adapted = AdaptedModel(Lora(), base, config, read)
    companions = folder if matching(folder, COMPANIONS) else base.companions
    return OpenedModel(folder, "peft", config, adapted.weights, companions, base.hub, adapted)


def stack_adapters(under: PeftContents, above: PeftContents, config: Any) -> PeftContents:
    """Joins two sets of adapters on one base into one. Where both adapt a contraction, their factors are concatenated along the
    rank, and each gain is multiplied into B."""
    specs, out = contractions(config), dict(under.adapters)
    for name, adapter in above.adapters.items():
        if (other := out.get(name)) is None:
            out[name] = adapter
            continue
        b = np.concatenate([np.float32(each.gain) * each.b for each in (other, adapter)], len(specs[name].group))
        out[name] = Adapter(np.concatenate([other.a, adapter.a], -1), b, 1.0)
    return PeftContents(out, {**under.whole, **above.whole}, above.dropout)
