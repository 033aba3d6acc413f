"""An exponential moving average of the weights. A run evaluates it, samples from it, and saves it for others to load.

    average_n = d_n average_(n-1) + (1 - d_n) weights_n        d_n = min(decay, (1 + n) / (10 + n)), n updates so far

The average covers about the last 1 / (1 - decay) updates (Polyak and Juditsky 1992). Early in training d_n is smaller than the decay,
as in the warm-up of TensorFlow's `ExponentialMovingAverage`. Otherwise the average of a new model would stay near random weights for
1 / (1 - decay) steps.

A checkpoint stores the average where readers look for weights. The trained weights, which training continues from, are stored with the
optimizer's state under `raw.`. A skipped step changes neither.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from argosy.core.settings import Also, Settings

# The prefix of the trained weights in a checkpoint, beside their average.
RAW = "raw."


class EmaSettings(Settings):
    """An average of the weights over the last updates."""

    decay: Annotated[float | None, Also("ema_decay", "use_ema", "ema_rate", note="false is none")] = Field(None, gt=0, lt=1)
    """Share of the average that an update keeps: 0.999 averages over about the last 1,000 updates. In the first updates n it is
    (1 + n) / (10 + n), where that is less. The average is evaluated, sampled from, saved and exported. None: no average."""

    @property
    def on(self) -> bool:
        return self.decay is not None

    def rate(self, updates: Any) -> Any:
        """Returns d_n after n = `updates` updates."""
        import jax.numpy as jnp

        n = jnp.asarray(updates, jnp.float32)
        return jnp.minimum(jnp.float32(self.decay), (1 + n) / (10 + n))


def with_average(step: Callable[..., Any], settings: EmaSettings) -> Callable[..., Any]:
    """Returns a step `(state, ...) -> state, metrics` that also updates the average. Without `ema.decay`, returns the step
    unchanged."""
    if not settings.on:
        return step

    def update(state: Any, *args: Any) -> Any:
        new, metrics = step(state, *args)
        d = settings.rate(new.step)
        average = {a: d * state.ema[a] + (1 - d) * w.astype(state.ema[a].dtype) for a, w in new.params.items()}
        return replace(new, ema=average), metrics

    return update
