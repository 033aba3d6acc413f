"""The engine of a run that learns from rollouts: the language model that completes prompts with the current weights.

On the trainer's devices, the engine's module holds the trainer's own arrays. On separate devices it holds copies, which are resharded
during the transfer. Copies are compared with their sources by a checksum over the bits of all weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from argosy.adapt.quant import QuantizedEinsum, int8
from argosy.adapt.settings import LAYERS
from argosy.adapt.surgery import find, put_at
from argosy.core.counts import plural
from argosy.core.errors import ArgosyError, BadInput, Unsupported
from argosy.data.tokenizers.load import Tokenizer
from argosy.infer.lm import LM
from argosy.infer.settings import EngineSettings
from argosy.models.parts.weight import Leaves, merge, put
from argosy.parallel.checksum import checksum
from argosy.rl.policy.critic import PREFIX
from argosy.rl.rollouts.settings import Rollout
from argosy.train.state import TrainState
from argosy.weights.build import tensor_shardings


def trainer_devices(settings: Rollout | None) -> list[Any]:
    """Returns the devices that train: all but those that only sample.

    Raises:
        BadInput: no device is left to train.
        Unsupported: sampling processes would share accelerators with this process.
    """
    here = jax.devices()
    if settings is not None and settings.processes is not None and here[0].platform != "cpu":
        problem = f"rollout.processes on {here[0].platform}: processes that sample have CPU devices, and this one has all others"
        raise Unsupported(problem, hint="rollout.devices=N samples on devices of this process")
    if settings is None or settings.devices is None:
        return here
    if settings.devices >= len(here):
        count = plural(len(here), "device")
        problem = f"rollout.devices = {settings.devices}, and this process has {count}: none is left to train"
        raise BadInput(problem, hint=f"to try it on a CPU: XLA_FLAGS=--xla_force_host_platform_device_count={settings.devices + 1}")
    return here[: -settings.devices]


def policy_weights(state: TrainState) -> Leaves:
    """Returns the weights of a state by parameter name, without the critic's."""
    return {a: leaf for a, leaf in (state.params | state.rest).items() if not a.startswith(PREFIX)}


@dataclass
class RolloutEngine:
    """The language model of rollouts.

    config: the config of the model.
    graph: the structure of the trained module.
    shapes: the shapes of its weights, by parameter name.
    dtype: the type of the activations.
    tokenizer: the tokenizer.
    settings: the settings of rollouts.
    hub: the config.json of the initial model, which names end-of-sequence tokens.
    generation: the generation_config.json of the initial model, which names further end-of-sequence tokens.
    """

    config: Any
    graph: Any
    shapes: Leaves
    dtype: Any
    tokenizer: Tokenizer | None
    settings: Rollout
    hub: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)
    _lm: LM | None = field(default=None, init=False, repr=False)
    _places: dict[str, Any] | None = field(default=None, init=False, repr=False)
    _rounded: dict[str, QuantizedEinsum] = field(default_factory=dict, init=False, repr=False)

    def weights(self, state: TrainState) -> Leaves:
        """Returns the weights of a state on the engine's devices, without the critic's. They are copied if the engine has separate
        devices.

        Raises:
            ArgosyError: a copy differs from its source.
        """
        weights = policy_weights(state)
        if self.settings.devices is None:
            return weights
        if self._places is None:
            self._places = self._placed(weights)
        copies = {a: jax.device_put(leaf, self._places[a]) for a, leaf in weights.items()}
        source_sums, copy_sums = np.asarray(checksums(list(weights.values()))), np.asarray(checksums(list(copies.values())))
        if not np.array_equal(source_sums, copy_sums):
            wrong = [a for a, same in zip(weights, (source_sums == copy_sums).tolist(), strict=True) if not same]
            raise ArgosyError(
                f"{plural(len(wrong), 'weight')} arrived changed on the devices that sample, such as {wrong[0]}",
                hint="a device or its connection is faulty; nothing was learned from them, and checkpoints are good",
            )
        return copies

    def __call__(self, weights: Leaves) -> LM:
        """Returns the language model with these weights. It is the same object in each call, changed in place."""
        if self._lm is None:
            module = self._module(weights)
            if self.settings.weights == "int8":
                for name, of in find(module, LAYERS).items():
                    self._rounded[name] = int8(of)
                    put_at(module, name, self._rounded[name])
            settings = EngineSettings(slots=self.settings.slots)
            self._lm = LM(
                self.config, module, self.tokenizer, hub=self.hub, generation=self.generation, engine_settings=settings
            )
            return self._lm
        names = {f"{name}.w" for name in self._rounded}
        for name, of in self._rounded.items():
            of.put(of.codes(weights[f"{name}.w"]))
        put(self._lm.module, {a: leaf for a, leaf in weights.items() if a not in names})
        return self._lm

    def _placed(self, weights: Leaves) -> dict[str, Any]:
        """Returns the sharding of each weight on the engine's devices, by parameter name."""
        count = self.settings.devices
        assert count is not None
        devices = jax.devices()[-count:]
        if count == 1:
            return dict.fromkeys(weights, SingleDeviceSharding(devices[0]))
        return tensor_shardings(self._module(weights), count, devices)

    def _module(self, weights: Leaves) -> Any:
        """Builds the policy's module with these weights, without the critic."""
        module = merge(self.graph, {**self.shapes, **weights})
        module.dtype = self.dtype
        if hasattr(module, "critic"):
            del module.critic
        return module


@jax.jit
def checksums(arrays: list[jax.Array]) -> jax.Array:
    """Computes the checksum of each array: the sum of its bits as 32-bit words, modulo 2**32."""
    return jnp.stack([checksum(a) for a in arrays])
