"""The decoder of DeepSeek, with multi-token prediction (`models.deepseek` has the equations)."""

from collections.abc import Callable
from typing import Any

from flax import nnx
from jaxtyping import Array, Float, Int

from argosy.models.parts.ahead import Depth, MultiTokenPrediction
from argosy.models.parts.attention.attend import Attend
from argosy.models.parts.block import Block
from argosy.models.parts.decoder import Decoder
from argosy.models.parts.stack import Execution, Layer
from argosy.models.parts.stack.remat import rematerialize
from argosy.models.parts.weight import Leaves, merge, split
from argosy.models.settings import Reach


class DeepSeekDecoder(Decoder):
    """A `Decoder` that can also predict tokens further ahead, with `config.mtp` modules."""

    def __init__(self, config: Any, block: Callable[[str], Block], norm: Callable[[], nnx.Module], run: Execution | None):
        reach = Reach(None, config.rope.decided(config.context))
        plan = [Layer("dense" if i < config.dense else "experts", reach) for i in range(config.layers)]
        super().__init__(config, plan, block, norm(), run)
        self.mtp = MultiTokenPrediction(config.mtp, lambda: Depth(config.width, block("experts"), reach, norm)) if config.mtp else None

    def ahead(
        self, depth: int, x: Float[Array, "B T D"], tokens: Int[Array, "B T"], attend: Attend, cache: Any = None
    ) -> tuple[Float[Array, "B T D"], Any, dict[str, Array]]:
        """Computes the input of the head for predicting the token `depth` + 1 positions ahead. Returns the same as `hidden`, with the
        aux outputs of one layer.

        Args:
            depth: the index of the module, from 1 to `config.mtp`.
            x: the input of the head for predicting `depth` positions ahead: the result of `hidden`, or of `ahead` at depth - 1.
            tokens: for each position of x, the token `depth` positions ahead.
        """
        graph, weights = split(getattr(self.mtp, str(depth - 1)))

        def run(weights: Leaves, x: Array, embedded: Array, attend: Attend, cache: Any) -> Any:
            return merge(graph, weights)(x, embedded, attend, cache)

        ahead = rematerialize(run, self.layers.run.remat, unrolled=True)
        return ahead(weights, x, self.embedded(tokens, attend), attend, cache)
