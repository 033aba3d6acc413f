"""What every language family answers: the base of its config, and the small protocol of its module.

A family is data and one file. Its config counts what it builds (the laws hold it to that), builds it, and knows its names
on the Hub; its module is `hidden` and `unembed`.
"""

from typing import Any, ClassVar, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int
from pydantic import Field

from argosy.core.keymap import Row
from argosy.core.settings import Settings
from argosy.models.parts.attend import Attend
from argosy.models.parts.stack import Run, Stack, Told, Unroll

UNROLL = Unroll()


@runtime_checkable
class LanguageModel(Protocol):
    """The module of a family that predicts tokens."""

    config: Any
    layers: Stack
    dtype: Any

    def hidden(
        self, tokens: Int[Array, "B T"], attend: Attend, cache: Any = None
    ) -> tuple[Float[Array, "B T D"], Any, Told]:
        """What the head reads, the cache after these tokens, and what the layers told."""
        ...

    def unembed(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits, float32."""
        ...

    def __call__(
        self, tokens: Int[Array, "B T"], attend: Attend, cache: Any = None
    ) -> tuple[Float[Array, "B T V"], Any, Told]: ...


class FamilyConfig(Settings):
    """Settings that every family has. Everything architectural is in the config: nothing branches on a model's name."""

    hub_types: ClassVar[tuple[str, ...]] = ()
    # The `model_type`s of config.json that this family reads.

    preset: str | None = None
    """The preset these numbers came from."""
    vocab: int = Field(gt=0)
    """Rows of the embedding V."""
    width: int = Field(gt=0)
    """Width of the residual stream D."""
    layers: int = Field(gt=0)
    """Number of layers L."""
    context: int = Field(gt=0)
    """Longest sequence it was made for, in tokens."""
    tied: bool = False
    """The head is the embedding."""

    def build(self, run: Run = UNROLL) -> Any:
        """The module, every weight a description (`parts.weight`)."""
        raise NotImplementedError

    def parameters(self) -> int:
        """How many numbers it has, counted from the config alone."""
        raise NotImplementedError

    def flops(self, tokens: int) -> int:
        """Of one forward pass over a row of so many tokens: 2 for each multiply-add of every contraction, attention's
        in full (causal halving and windows are for the caller to state)."""
        raise NotImplementedError

    def resolved(self) -> "FamilyConfig":
        """The same model with every size told that would otherwise follow from others."""
        return self

    @classmethod
    def examples(cls) -> dict[str, Any]:
        """Small configs in odd sizes, every option both ways: the laws of families run over them."""
        raise NotImplementedError

    def hub_rows(self) -> tuple[list[Row], dict[str, int]]:
        """Names on the Hub, and the sizes its readings use."""
        raise NotImplementedError

    @classmethod
    def from_hub(cls, config: dict[str, Any]) -> "FamilyConfig":
        """From a Hub folder's config.json. A key that would change the numbers and is not understood is an error."""
        raise NotImplementedError

    def to_hub(self) -> dict[str, Any]:
        raise NotImplementedError
