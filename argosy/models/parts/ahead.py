"""Multi-token prediction: a chain of modules, each predicting one token further ahead.

    h_d = norm(layer(W [norm(embedding of token t+d) ; norm(h_(d-1))]))        the head on h_d predicts token t+d+1

h_0 is the input of the model's head, after its final norm, as in vLLM (deepseek_mtp.py) and transformers (MtpModel); both put the
embedding first. Embedding and head are the model's own. DeepSeek-V3 (arXiv:2412.19437, section 2.2).
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from argosy.models.parts.attention.attend import Attend
from argosy.models.parts.attention.cache import Cache
from argosy.models.parts.einsum import Einsum

# I: the features of an embedding and of the head's input, concatenated.
LEGEND = (("I", "mtp_input"),)


class Depth(nnx.Module):
    """One module of the chain.

    Args:
        width: the width D of the residual stream.
        block: one layer, as in `Stack`.
        each: the fixed settings of that layer (`stack.Layer.each`).
        norm: builds a norm of width D.
    """

    def __init__(self, width: int, block: Any, each: Any, norm: Callable[[], nnx.Module]):
        self.each = each
        self.embed_norm, self.hidden_norm, self.norm = norm(), norm(), norm()
        self.proj = Einsum("BTI,ID->BTD", {"I": 2 * width, "D": width}, legend=LEGEND)
        self.block = block

    def __call__(
        self, x: Float[Array, "B T D"], embedded: Float[Array, "B T D"], attend: Attend, cache: Cache | None = None
    ) -> tuple[Float[Array, "B T D"], Cache | None, dict[str, Array]]:
        x = self.proj(jnp.concatenate([self.embed_norm(embedded), self.hidden_norm(x)], -1))
        x, cache, aux = self.block(x, self.each, cache, attend)
        return self.norm(x), cache, aux


class MultiTokenPrediction(nnx.Module):
    """The chain of `depths` modules, which are named "0", "1", ... `make` builds one."""

    def __init__(self, depths: int, make: Callable[[], Depth]):
        for d in range(depths):
            setattr(self, str(d), make())
