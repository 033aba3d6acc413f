"""A language model around its layers: embedding, layers, final norm and head, from tokens to logits.

B batch, T time, D width, V vocabulary, A positions.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from argosy.models.parts.attention.attend import Attend
from argosy.models.parts.einsum import Einsum
from argosy.models.parts.inputs import Inputs, as_inputs
from argosy.models.parts.rotations import check_rotations, with_rotations
from argosy.models.parts.stack import Aux, Execution, Layer, Stack
from argosy.ops.precision import sums_in
from argosy.parallel.scope import constrain


def head_of(config: Any) -> Einsum | None:
    """Builds the head, which maps the last layer's output to logits or scores. None if the embedding is the head (tied embeddings)."""
    if getattr(config, "scores", 0):
        # The same standard deviation as for new heads in transformers, so that initial scores are near 0.
        return Einsum("BTD,DZ->BTZ", config.dims, scale=0.02)
    return None if config.tied else Einsum("BTD,DV->BTV", config.dims)


class Decoder(nnx.Module):
    """Maps tokens to logits, or to scores if the config has `scores`. The attribute `dtype` is the type of activations and so of
    contractions.

    Args:
        config: the family's config. Its fields vocab, width, tied and dims are read.
        plan, make, run: as in `Stack`.
        norm: the final norm.
        gain: a factor on the embedding's output. None: 1.
        logit_cap: caps logits softly, as cap * tanh(logits / cap). None: no cap.
        positions: whether a learned vector for each position is added to the embedding's output.
    """

    def __init__(
        self,
        config: Any,
        plan: Sequence[Layer],
        make: Callable[[str], Any],
        norm: nnx.Module,
        run: Execution | None,
        *,
        gain: float | None = None,
        logit_cap: float | None = None,
        positions: bool = False,
    ):
        self.config, self.dtype = config, jnp.float32
        self.gain, self.logit_cap = gain, logit_cap
        self.embed = Einsum("BTV,VD->BTD", config.dims, scale=0.02)
        self.positions = Einsum("BTA,AD->BTD", config.dims, scale=0.02) if positions else None
        self.layers = Stack(plan, lambda kind: with_rotations(make(kind), config.rotations), run=run)
        check_rotations(self.layers, config.rotations)
        self.norm = norm
        self.head = head_of(config)

    def embedded(self, tokens: Int[Array, "B T"] | Inputs, attend: Attend) -> Float[Array, "B T D"]:
        """Computes the input of the first layer."""
        ids, overlay, _ = as_inputs(tokens)
        x = self.embed.take(ids).astype(self.dtype)
        x = x if self.gain is None else x * jnp.asarray(self.gain, x.dtype)
        x = x if overlay is None else overlay.onto(x)
        return x if self.positions is None else x + self.positions.take(attend.positions).astype(x.dtype)

    def hidden(
        self, tokens: Int[Array, "B T"] | Inputs, attend: Attend, cache: Any = None
    ) -> tuple[Float[Array, "B T D"], Any, Aux]:
        """Computes the input of the head. Also returns the cache after these tokens, and the aux outputs of the layers."""
        with jax.named_scope("embed"):
            x = self.embedded(tokens, attend)
        x, cache, aux = self.layers(x, cache, attend, positions=as_inputs(tokens).positions)
        return constrain(self.norm(x), "B T D"), cache, aux

    def unembed(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Computes logits, or scores [B T Z], from the output of `hidden`. They are float32 at least, whatever the dtype of x."""
        with jax.named_scope("head"):
            if self.head is None:
                y = self.embed.via("BTD,VD->BTV", x, dtype=sums_in(x.dtype))
            else:
                y = self.head(x, dtype=sums_in(x.dtype))
        if getattr(self.config, "scores", 0):
            return y
        y = constrain(y, "B T V")
        return y if self.logit_cap is None else self.logit_cap * jnp.tanh(y / self.logit_cap)

    def __call__(
        self, tokens: Int[Array, "B T"] | Inputs, attend: Attend, cache: Any = None
    ) -> tuple[Float[Array, "B T V"], Any, Aux]:
        x, cache, aux = self.hidden(tokens, attend, cache)
        return self.unembed(x), cache, aux
