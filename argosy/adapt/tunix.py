"""Adapts a model to Google's Tunix, so that Tunix can train it with or without adapters: `PeftTrainer(ForTunix(lm), ...)`.

Tunix (google-tunix, an extra: `pip install '.[tunix]'`) calls `model(tokens, positions, cache, attention_mask)` and expects logits and
a cache. It finds adapters by their type `nnx.LoRAParam`, which `adapt.lora` uses, and then trains only these. Otherwise it trains
every `nnx.Param`. This module does not import Tunix, so it works with any trainer of NNX modules that calls a model in this way.

    lm = argosy.load("path/to/model", dtype="float32")
    swap(lm.module, r"layers\\..*", lambda of: LoRA(of, rank=8, alpha=16.0))
    fill(lm.module, jax.random.key(0), addresses=layer_addresses(lm.module))
    trainer = PeftTrainer(ForTunix(lm), optax.adamw(1e-3), TrainingConfig(eval_every_n_steps=100, max_steps=100))
    ...
    lm.save("path/to/adapter", format="peft")

The trainer changes the weights of `lm` in place. Its rollouts need a cache, which this model does not return. Use `lm.generate` for
rollouts.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from argosy.core.errors import BadInput, Unsupported


class ForTunix(nnx.Module):
    """A decoder that is called as Tunix calls models. It shares the weights of the model and copies nothing.

    Args:
        lm: an `argosy.LM`, or an object with the attributes `config` and `module`.

    Raises:
        BadInput: the model does not predict tokens.
    """

    def __init__(self, lm: Any):
        if not lm.config.causal or lm.config.scored:
            raise BadInput("Tunix trains models that predict tokens, and this one does not")
        self.module = lm.module

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        cache: Any = None,
        attention_mask: Bool[Array, "B T T"] | None = None,
    ) -> tuple[Float[Array, "B T V"], None]:
        """Computes the logits. Returns them and None in place of a cache.

        Args:
            positions: ignored. Positions count the tokens of each sequence, as in Tunix's `build_positions_from_mask`.
            attention_mask: whether a token (middle axis) attends to another (last axis). It must be causal within each sequence, as
                that of Tunix's `make_causal_attn_mask`, and may have several sequences per row. A token that does not attend to itself
                is padding, and one that does not attend to the token before begins a sequence. With None, each row is one sequence
                without padding.

        Raises:
            Unsupported: a cache is given.
        """
        if cache is not None:
            raise Unsupported("a cache in Tunix's form is not built", hint="lm.generate rolls out with the same weights")
        segments = jnp.ones_like(tokens) if attention_mask is None else segments_of(attention_mask)
        return self.module(tokens, self.module.config.attend(segments))[0], None


def segments_of(attention_mask: Bool[Array, "B T T"]) -> Int[Array, "B T"]:
    """Returns the number of the sequence that each token belongs to, from 1 on; 0 for padding."""
    live = jnp.diagonal(attention_mask, axis1=1, axis2=2)
    before = jnp.diagonal(attention_mask, -1, axis1=1, axis2=2)
    starts = live & ~jnp.pad(before, ((0, 0), (1, 0)))
    return jnp.where(live, jnp.cumsum(starts, 1), 0).astype(jnp.int32)
