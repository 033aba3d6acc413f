"""The interface of a module that predicts tokens."""

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int

from argosy.models.parts.attention.attend import Attend
from argosy.models.parts.inputs import Inputs
from argosy.models.parts.stack import Aux, Stack


@runtime_checkable
class LanguageModel(Protocol):
    """The module of a family that predicts tokens."""

    config: Any
    layers: Stack
    dtype: Any

    def hidden(
        self, tokens: Int[Array, "B T"] | Inputs, attend: Attend, cache: Any = None
    ) -> tuple[Float[Array, "B T D"], Any, Aux]:
        """The input of the head, the cache after these tokens, and the aux outputs of the layers."""
        ...

    def unembed(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits, float32."""
        ...

    def __call__(
        self, tokens: Int[Array, "B T"] | Inputs, attend: Attend, cache: Any = None
    ) -> tuple[Float[Array, "B T V"], Any, Aux]: ...
