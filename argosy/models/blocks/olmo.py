"""The block of OLMo 2 and 3: norms after the sublayers (`models.olmo` has the equations)."""

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


class PostNorm(nnx.Module):
    """Attention, then the feed-forward layer; each output is normalized before it is added."""

    def __init__(self, attn: Attention, mlp: GLU, norm: Any):
        self.attn, self.post_attn_norm = attn, norm()
        self.mlp, self.post_mlp_norm = mlp, norm()

    def holds(self, each: Reach) -> Spec:
        return self.attn.holds(each)

    def turns(self, each: Reach) -> Turns:
        return turns_of(self.attn, each)

    def __call__(
        self, x: Float[Array, "B T D"], each: Reach, cache: Cache | None, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Cache | None, dict[str, Array]]:
        y, cache = self.attn(x, each, cache, attend)
        x = x + self.post_attn_norm(y)
        return x + self.post_mlp_norm(self.mlp(x)), cache, {}
