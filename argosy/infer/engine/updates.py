"""New weights from files for a model that is being served. All are read and checked before the first weight is replaced.

    update = WeightUpdate(model, context)
    update.add("runs/grpo/checkpoints/300")         a Hub folder, a run directory, one checkpoint, a GGUF file; or a .safetensors file
    engine.swap_weights(update.leaves())

A `.safetensors` file may hold only some of the weights, under the Hub's names or under per-layer names ("layers.3.attn.q.w"). The other
weights stay as they are. Until the result of `leaves` is swapped in, memory holds the new weights beside the old ones.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from argosy.checkpoint.open import open_model
from argosy.core.counts import plural
from argosy.core.errors import BadInput, nearest, some
from argosy.core.formats import TensorReader
from argosy.core.formats.safetensors import SafeTensors
from argosy.core.keymap import KeyMap
from argosy.models.parts.stack.addresses import stored_addresses
from argosy.models.parts.weight import Codes, Leaves, storage_dtype, variables
from argosy.weights.hub.reader import with_expected_names

# Settings in which the model of the new weights may differ: its preset's name, and the longest sequence that it was made for.
MAY_DIFFER = ("preset", "context")


class WeightUpdate:
    """Weights that will replace those of a model.

    Args:
        model: the module that is being served. It is not changed.
        context: the most tokens of a sequence that is served. It selects among scaled rotary frequencies, as at loading.

    Raises:
        BadInput: the model was quantized here or has adapters, so that its weights differ from those of a file.
    """

    def __init__(self, model: Any, context: int):
        self.model, self.context = model, context
        self._own = variables(model)
        self._stored = stored_addresses(model)
        self._staged: dict[str, np.ndarray] = {}
        if any(isinstance(v, Codes) or ".of." in address for address, v in self._own.items()):
            problem = "the weights of a model that was quantized here, or has an adapter, cannot be replaced by those of a file"
            raise BadInput(problem, hint="serve the plain model; `engine.lora.enabled=true` has adapters beside it")

    def __len__(self) -> int:
        """The number of weights read so far. Each layer's weights count separately."""
        return len(self._staged)

    def add(self, path: str | Path) -> int:
        """Reads the weights of a model or a file, and returns how many. They replace weights of the same names that were added earlier.

        Raises:
            BadInput: the model has other settings, or weights are unknown or of another shape. Nothing is added then.
            Damaged: a file differs from what was written.
        """
        path = Path(path)
        if path.is_file() and path.suffix == ".safetensors":
            weights = self._weight_readers(SafeTensors.open(path))
        else:
            stored = open_model(path)
            self._check_settings(stored.config)
            weights = dict.fromkeys(stored.weights.names, stored.weights.read)
            if lacking := sorted(set(self._stored) - set(weights)):
                raise BadInput(f"{plural(len(lacking), 'weight', 'is', 'are')} missing: {', '.join(lacking[:4])}")
            self._check({name: stored.weights.shape(name) for name in weights})
        arrays = {name: self._convert(name, read(name)) for name, read in weights.items()}
        self._staged |= arrays
        return len(arrays)

    def leaves(self) -> Leaves:
        """The weights for `Engine.swap_weights`, by the model's parameter names and on its devices. Where layers are stacked in one
        array, those that were not added keep their weights."""
        parts: dict[str, dict[int | None, np.ndarray]] = {}
        for name, array in self._staged.items():
            address, layer = self._stored[name]
            parts.setdefault(address, {})[layer] = array
        out = {}
        for address, layers in parts.items():
            old = self._own[address].get_value()
            if None in layers:
                whole = layers[None]
            elif len(layers) == old.shape[0]:
                whole = np.stack([layers[i] for i in range(len(layers))])
            else:
                whole = np.array(old)
                for i, array in layers.items():
                    whole[i] = array
            out[address] = jax.device_put(whole, old.sharding)
        return out

    def _weight_readers(self, file: SafeTensors) -> dict[str, Any]:
        """A function that reads each weight of a file, by per-layer name."""
        if not file.names:
            raise BadInput("the file holds no weights")
        if set(file.names) <= set(self._stored):
            self._check({name: file.shape(name) for name in file.names})
            return dict.fromkeys(file.names, file.read)
        config = self.model.config
        table = KeyMap(*config.hub_rows())
        reader: TensorReader = file
        if config.hub_prefixes or config.hub_old_ends:
            reader = with_expected_names(reader, config.hub_prefixes, config.hub_old_ends, table.names)
        ours = table.ours_of(reader.names)
        if strange := sorted(set(reader.names) - set(ours)):
            problem = f"{plural(len(strange), 'tensor', 'is no weight', 'are no weights')} of this model: {', '.join(strange[:4])}"
            raise BadInput(problem, hint=nearest(strange[0], [*table.names, *self._stored]))
        names = {path for paths in ours.values() for path in paths}
        self._check({name: table.shape(name) for name in names})
        return dict.fromkeys(sorted(names), lambda name: table.read(reader, name))

    def _check_settings(self, config: Any) -> None:
        model_config, context = self.model.config, min(self.context, config.context)
        if type(config) is not type(model_config):
            raise BadInput(f"weights of another family: {type(config).__name__}, and the model is {type(model_config).__name__}")
        theirs, ours = config.for_context(context), model_config.for_context(context)
        differ = [k for k in type(model_config).model_fields if k not in MAY_DIFFER and getattr(theirs, k) != getattr(ours, k)]
        if differ:
            differences = [f"{key} = {str(getattr(theirs, key))[:40]}, not {str(getattr(ours, key))[:40]}" for key in differ]
            raise BadInput(f"weights of a model with other settings: {some(differences)}")

    def _check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        expected = {name: self._shape(name) for name in self._stored}
        strange = [f"unexpected {name}" for name in shapes if name not in expected]
        wrong = [f"{n} is {tuple(s)}, not {expected[n]}" for n, s in shapes.items() if n in expected and tuple(s) != expected[n]]
        if problems := strange + wrong:
            raise BadInput(f"{plural(len(problems), 'weight', 'does', 'do')} not fit the model: {'; '.join(problems[:4])}")

    def _shape(self, name: str) -> tuple[int, ...]:
        address, layer = self._stored[name]
        shape = tuple(self._own[address].shape)
        return shape if layer is None else shape[1:]

    def _convert(self, name: str, array: np.ndarray) -> np.ndarray:
        """A weight in the type in which the model stores it. It is a copy, because a mapped file may be replaced later."""
        v = self._own[self._stored[name][0]]
        return np.array(array, np.dtype(storage_dtype(v, v.dtype)))
