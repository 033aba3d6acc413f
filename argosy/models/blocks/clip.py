"""The module of CLIP's text encoder (`models.clip` has the equations)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from argosy.models.parts.attention.attend import Attend
from argosy.models.parts.einsum import Einsum
from argosy.models.parts.inputs import Inputs, as_inputs
from argosy.models.parts.norm import LayerNorm
from argosy.models.parts.stack import Aux, Execution, Layer, Stack
from argosy.models.parts.stack.watch import OUTPUT, WatchedAttend
from argosy.parallel.scope import constrain

# The wrong id of the end-of-text token that folders of 2023 and older have. The true id is the largest.
LEGACY_EOS = 2


class ClipTextEncoder(nnx.Module):
    """Maps each token to a vector, and each text to one vector (`pooled`)."""

    def __init__(self, config: Any, plan: Sequence[Layer], make: Callable[[str], Any], run: Execution | None):
        self.config, self.dtype = config, jnp.float32
        self.embed = Einsum("BTV,VD->BTD", config.dims, scale=0.02)
        self.positions = Einsum("BTA,AD->BTD", config.dims, scale=0.01)
        self.layers = Stack(plan, make, run=run)
        self.norm = LayerNorm(config.width, config.norm_eps)
        self.pooler = Einsum("BD,DO->BO", config.dims) if config.projection else None

    def embedded(self, tokens: Int[Array, "B T"] | Inputs, attend: Attend) -> Float[Array, "B T D"]:
        """Computes the input of the first layer."""
        inputs = as_inputs(tokens)
        if inputs.overlay is None:
            x = self.embed.take(inputs.ids)
        else:
            # Tokens of learned embeddings have ids past the vocabulary.
            x = inputs.overlay.onto(self.embed.take(jnp.minimum(inputs.ids, self.config.vocab - 1)))
        return (x + self.positions.take(attend.positions)).astype(self.dtype)

    def hidden(self, tokens: Int[Array, "B T"] | Inputs, attend: Attend, cache: Any = None) -> tuple[Float[Array, "B T D"], Any, Aux]:
        """Computes a vector for each token. Also returns the cache, unchanged, and the aux outputs of the layers."""
        x, cache, aux = self.layers(self.embedded(tokens, attend), cache, attend)
        return constrain(self.norm(x), "B T D"), cache, aux

    def states(self, tokens: Int[Array, "B T"] | Inputs, attend: Attend) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
        """Computes a vector for each token. Also returns the residual stream before the last layer, which SDXL and SD3 read."""
        x, _, aux = self.hidden(tokens, WatchedAttend(attend, outputs=True))
        layers, _ = self.layers.layer_aux(aux)
        return x, layers[-2][OUTPUT] if len(layers) > 1 else self.embedded(tokens, attend)

    def ends(self, tokens: Int[Array, "B T"]) -> Int[Array, "B"]:
        """Returns the index of the first end-of-text token in each row."""
        eos = self.config.eos
        where = jnp.argmax(tokens, 1) if eos == LEGACY_EOS else jnp.argmax(tokens == eos, 1)
        return where.astype(jnp.int32)

    def project(self, x: Float[Array, "B D"]) -> Float[Array, "B O"]:
        """Projects vectors of texts into the space that they share with images. Returns them unchanged if there is no projection."""
        return x if self.pooler is None else self.pooler(x)

    def pooled(self, x: Float[Array, "B T D"], tokens: Int[Array, "B T"]) -> Float[Array, "B O"]:
        """Computes the vector of each text, from the vectors of its tokens: that of the end-of-text token, projected."""
        return self.project(jnp.take_along_axis(x, self.ends(tokens)[:, None, None], 1)[:, 0])

    def __call__(self, tokens: Int[Array, "B T"], attend: Attend, cache: Any = None) -> tuple[Float[Array, "B T D"], Any, Aux]:
        return self.hidden(tokens, attend, cache)


def text_states(model: Any, tokens: Int[Array, "B T"] | Inputs, attend: Attend) -> dict[str, Array]:
    """Computes the text states that denoisers read.

    With configs of 2023 and older (`LEGACY_EOS`), `pooled` is read at the token with the largest id. A token of a learned embedding has
    an id past the vocabulary, so `pooled` is then read at that token, as in transformers.

    Returns:
        `hidden` and `penultimate` [B T D], the states after and before the last layer, and `pooled` [B O].
    """
    hidden, penultimate = model.states(tokens, attend)
    return {"hidden": hidden, "penultimate": penultimate, "pooled": model.pooled(hidden, as_inputs(tokens).ids)}


def unet_conditions(states: Sequence[Mapping[str, Array]]) -> tuple[Float[Array, "B T E"], Float[Array, "B O"] | None]:
    """Selects the text states and the pooled vector that UNets of Stable Diffusion read, in float32.

    Args:
        states: the result of `text_states` for each encoder. One encoder (1 and 2) gives its last states, and no pooled vector. Two
            (XL) give their states before the last layer, concatenated along the features, and the second encoder's pooled vector.
    """
    if len(states) == 1:
        return states[0]["hidden"].astype(jnp.float32), None
    side = jnp.concatenate([state["penultimate"].astype(jnp.float32) for state in states], -1)
    return side, states[-1]["pooled"].astype(jnp.float32)
