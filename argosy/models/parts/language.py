"""The interface of a module that predicts tokens."""

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int

from argosy.models.parts.attention.attend import Attend
from argosy.models.parts.inputs import Inputs
from argosy.models.parts.stack import Aux, Stack


@runtime_checkable
class LanguageModel(Protocol):
    """A model that predicts tokens."""

    config: Any
    layers: Stack
    dtype: Any

    def hidden(
        self, tokens: Int[Array, "B T"] | Inputs, attend: Attend, cache: Any = None
    ) -> tuple[Float[Array, "B T D"], Any, Aux]:
        """Computes the input of the head. Also returns the cache after these tokens, and the aux outputs of the layers."""
        ...

    def unembed(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Computes float32 logits from the output of `hidden`."""
        ...

    def __call__(
        self, tokens: Int[Array, "B T"] | Inputs, attend: Attend, cache: Any = None
    ) -> tuple[Float[Array, "B T V"], Any, Aux]: ...
