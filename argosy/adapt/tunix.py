"""A model in the form that Google's Tunix trains: `PeftTrainer(ForTunix(lm), ...)`, with adapters or without.

Tunix (google-tunix, an extra: `pip install '.[tunix]'`) calls `model(tokens, positions, cache, attention_mask)` and wants logits
and a cache. It finds adapters by their type, `nnx.LoRAParam`, which is that of `adapt.lora`, and then trains them alone; otherwise
every `nnx.Param`. This file imports nothing of Tunix, so it works with any trainer of NNX modules that calls a model so.

    lm = argosy.load("path/to/model", dtype="float32")
    swap(lm.module, r"layers\\..*", lambda of: LoRA(of, rank=8, alpha=16.0))
    fill(lm.module, jax.random.key(0), addresses=layer_addresses(lm.module))
    trainer = PeftTrainer(ForTunix(lm), optax.adamw(1e-3), TrainingConfig(eval_every_n_steps=100, max_steps=100))
    ...
    lm.save("path/to/adapter", format="peft")

The trainer changes the weights of `lm` itself. Its rollouts need a cache, which this model does not give: roll out with `lm.generate`.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from argosy.core.errors import BadInput, Unsupported


class ForTunix(nnx.Module):
    """A decoder called as Tunix calls models. Its weights are those of the model, not copies.

    Args:
        lm: an `argosy.LM`, or anything with its `config` and `module`.

    Raises:
        BadInput: the model predicts no tokens.
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
        """Logits, and no cache.

        Args:
            positions: not read: they count the tokens of a sequence, as Tunix's `build_positions_from_mask` does.
            attention_mask: whether a token (the middle axis) sees another: causal within each sequence, as Tunix's
                `make_causal_attn_mask` makes it, or for several sequences a row. A token that does not see itself is padding; one
                that does not see the token before it begins a sequence. None: rows of one sequence without padding.

        Raises:
            Unsupported: a cache is given.
        """
        if cache is not None:
            raise Unsupported("a cache in Tunix's form is not built", hint="lm.generate rolls out with the same weights")
        segments = jnp.ones_like(tokens) if attention_mask is None else segments_of(attention_mask)
        return self.module(tokens, self.module.config.attend(segments))[0], None


def segments_of(attention_mask: Bool[Array, "B T T"]) -> Int[Array, "B T"]:
    """The number of the sequence that each token belongs to, from 1; 0 for padding."""
    live = jnp.diagonal(attention_mask, axis1=1, axis2=2)
    before = jnp.diagonal(attention_mask, -1, axis1=1, axis2=2)
    starts = live & ~jnp.pad(before, ((0, 0), (1, 0)))
    return jnp.where(live, jnp.cumsum(starts, 1), 0).astype(jnp.int32)
