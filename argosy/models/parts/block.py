"""The block of most models: a mixer of tokens (attention, a recurrence) and a feed-forward part on a residual stream.

    h = after(x + post(mixer(pre(x))))        y = after(h + post(mlp(pre(h))))

Arguments choose where norms stand: before each sublayer (Llama), on each sublayer's output (OLMo 2), both (Gemma 2), or on the sum
(BERT; Vaswani et al. 2017, arXiv:1706.03762). A block may also have only one of the two sublayers.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Bool, Float

from argosy.models.parts.attention.attend import Attend
from argosy.models.parts.attention.cache import Cache, Spec
from argosy.models.parts.attention.rope import Turns
from argosy.models.parts.moe import MoE
from argosy.models.parts.stack import turns_of

Norm = Callable[[], nnx.Module]


class Block(nnx.Module):
    """A mixer and a feed-forward part, each with norms where the family has them.

    Args:
        mixer: a layer that is called as `mixer(x, each, cache, attend)`. None for a block without a mixer.
        mlp: a feed-forward layer or experts. None for a block without a feed-forward part.
        pre: builds the norm of a sublayer's input.
        post: builds the norm of a sublayer's output, before it is added to the stream.
        after: builds the norm of the stream after the addition.
        cached: whether the mixer caches earlier tokens for later calls. Encoders do not need this, since they get whole sequences.

    Raises:
        ValueError: there is no sublayer, or both `pre` and `after` are given.
    """

    def __init__(
        self,
        mixer: Any = None,
        mlp: Any = None,
        *,
        pre: Norm | None = None,
        post: Norm | None = None,
        after: Norm | None = None,
        cached: bool = True,
    ):
        if mixer is None and mlp is None:
            raise ValueError("a block needs a mixer or a feed-forward part")
        if pre and after:
            raise ValueError("a block has norms before its sublayers or after the additions, not both")
        self.attn, self.mlp, self.norm_after, self.cached = mixer, mlp, after is not None, cached
        norm = pre or after
        if mixer is not None:
            self.attn_norm, self.post_attn_norm = norm and norm(), post and post()
        if mlp is not None:
            self.mlp_norm, self.post_mlp_norm = norm and norm(), post and post()

    @property
    def formula(self) -> str:
        """The formula of a sublayer on the stream x, with {} in place of the sublayer's name, such as "x + {}(norm(x))"."""
        read = "{}(norm(x))" if self._has_norm("norm") and not self.norm_after else "{}(x)"
        added = f"norm({read})" if self._has_norm("post") else read
        return f"norm(x + {added})" if self.norm_after else f"x + {added}"

    def _has_norm(self, kind: str) -> bool:
        part = "attn" if self.attn is not None else "mlp"
        return getattr(self, f"{part}_norm" if kind == "norm" else f"post_{part}_norm") is not None

    def holds(self, each: Any) -> Spec:
        """What the mixer caches. Empty if the block caches nothing."""
        return self.attn.holds(each) if self.attn is not None and self.cached else Spec()

    def turns(self, each: Any) -> Turns:
        """The rotary positions that the mixer applies."""
        return turns_of(self.attn, each)

    def __call__(
        self, x: Float[Array, "B T D"], each: Any, cache: Cache | None, attend: Attend, condition: Any = None
    ) -> tuple[Float[Array, "B T D"], Cache | None, dict[str, Array]]:
        """Runs the block. Returns the stream, the updated cache of this layer, and the aux outputs of experts.

        Raises:
            ValueError: a condition is given. This block reads none.
        """
        if condition is not None:
            raise ValueError("this block reads no condition")
        aux: dict[str, Array] = {}
        if self.attn is not None:
            with jax.named_scope("attn"):
                y, cache = self.attn(self._read(x, self.attn_norm), each, cache, attend)
                x = self._added(x, y, self.attn_norm, self.post_attn_norm)
        if self.mlp is not None:
            with jax.named_scope("mlp"):
                y, aux = feed_forward(self.mlp, self._read(x, self.mlp_norm), attend.live)
                x = self._added(x, y, self.mlp_norm, self.post_mlp_norm)
        return x, cache, aux

    def _read(self, x: Array, norm: Any) -> Array:
        return x if norm is None or self.norm_after else norm(x)

    def _added(self, x: Array, y: Array, norm: Any, post: Any) -> Array:
        x = x + (y if post is None else post(y))
        return norm(x) if self.norm_after else x


def feed_forward(
    mlp: Any, x: Float[Array, "B T D"], live: Bool[Array, "B T"]
) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
    """Applies a feed-forward layer, or experts. Also returns the aux outputs of experts; a feed-forward layer has none."""
    return mlp(x, live) if isinstance(mlp, MoE) else (mlp(x), {})
