"""The block of Gemma 2 and 3: norms before and after both sublayers (`models.gemma` has the equations)."""

from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from argosy.models.parts.attend import Attend
from argosy.models.parts.cache import Cache, Spec
from argosy.models.parts.heads import Attention
from argosy.models.parts.mlp import GLU
from argosy.models.parts.rope import Turns
from argosy.models.parts.stack import turns_of
from argosy.models.settings import Reach


class Sandwich(nnx.Module):
    """Attention, then the feed-forward layer, each with a norm before and after."""

    def __init__(self, attn: Attention, mlp: GLU, norm: Any):
        self.attn_norm, self.attn, self.post_attn_norm = norm(), attn, norm()
        self.mlp_norm, self.mlp, self.post_mlp_norm = norm(), mlp, norm()

    def holds(self, each: Reach) -> Spec:
        return self.attn.holds(each)

    def turns(self, each: Reach) -> Turns:
        return turns_of(self.attn, each)

    def __call__(
        self, x: Float[Array, "B T D"], each: Reach, cache: Cache | None, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Cache | None, dict[str, Array]]:
        y, cache = self.attn(self.attn_norm(x), each, cache, attend)
        x = x + self.post_attn_norm(y)
        return x + self.post_mlp_norm(self.mlp(self.mlp_norm(x))), cache, {}
