"""A model that Qwix quantizes by the rules of a preset, the baseline of `quantize_methods.py`: rounding to nearest.

Qwix is no dependency: `pip install qwix==0.1.8` into an environment of its own, or a folder on PYTHONPATH. It replaces calls while the
whole model runs, so the model has no engine here; tests take its log-probabilities from `QwixScorer`, in place of `lm.sequences()`.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from argosy.adapt.formats.blocks import granularity_of
from argosy.adapt.qwix import FORMAT_NAMES
from argosy.adapt.rules import preset_rules, schemes_of
from argosy.adapt.surgery import at
from argosy.infer.forward.sequences import TokenScores

TYPES = {name: kind for kind, name in FORMAT_NAMES.items()}


class NoQwix(Exception):
    """Qwix has no such format, or cannot tile a weight by it."""


def qwix_rules(model: Any, preset: str) -> list[Any]:
    """A rule for each contraction that the preset quantizes, with the block that ours has along the last summed axis.

    Raises:
        NoQwix: there is no such format, or a tile of two axes.
    """
    import qwix

    out = []
    for name, scheme in schemes_of(model, preset_rules(preset)).items():
        of = at(model, name)
        axis_count = granularity_of(scheme.granularity, scheme.format.block)[1]
        if scheme.weights not in TYPES or scheme.activations not in (None, *TYPES) or axis_count != 1 or scheme.is_static:
            raise NoQwix(f"no rule for {preset}")
        last = max(i for i, letter in enumerate(of.spec) if letter in of.inner)
        block = scheme.block(of)[last]
        is_channel = granularity_of(scheme.granularity, scheme.format.block)[0] is None
        kinds = {"weight_qtype": TYPES[scheme.weights], "act_qtype": scheme.activations and TYPES[scheme.activations]}
        if scheme.weights.startswith(("mx", "nv")) and block != scheme.format.block:
            raise NoQwix(f"{preset}: blocks of {block} in {name}")
        tile = None if is_channel else block
        # Data has one scale for a token where ours has; the tile is that of both factors in Qwix.
        out.append(qwix.QuantizationRule(module_path=re.escape(name.replace(".", "/")), tile_size=tile, **kinds))
    return out


def qwix_model(model: Any, preset: str, attend: Any, ids: Any) -> Any:
    """The model, quantized by Qwix.

    Raises:
        NoQwix: Qwix cannot.
    """
    import qwix

    try:
        return qwix.quantize_model(model, qwix.PtqProvider(qwix_rules(model, preset)), ids, attend(jnp.ones_like(ids)))
    except ValueError as error:
        raise NoQwix(str(error)) from None


class QwixScorer:
    """Log-probabilities of whole sequences by such a model.

    Args:
        attend: makes the attention of the tokens' segments, 0 for padding.
    """

    def __init__(self, model: Any, attend: Any):
        # As an argument: constants of a program are folded, for minutes.
        graph, self.state = nnx.split(model)

        def run(state: Any, ids: Any, segments: Any) -> tuple[Any, Any]:
            logits = nnx.merge(graph, state)(ids, attend(segments))[0].astype(jnp.float32)[:, :-1]
            target = jnp.take_along_axis(logits, ids[:, 1:, None], -1)[..., 0]
            return target - jax.nn.logsumexp(logits, -1), logits.argmax(-1) == ids[:, 1:]

        self.run = jax.jit(run)

    def scores(self, rows: list[list[int]]) -> list[TokenScores]:
        """As `SequenceScorer.scores`."""
        longest = -(-max(map(len, rows)) // 64) * 64
        count = 1 << (len(rows) - 1).bit_length()
        ids, segments = np.zeros((count, longest), np.int32), np.zeros((count, longest), np.int32)
        for i, row in enumerate(rows):
            ids[i, : len(row)], segments[i, : len(row)] = row, 1
        chances, greedy = map(np.asarray, self.run(self.state, ids, segments))
        return [TokenScores(chances[i, : len(row) - 1], greedy[i, : len(row) - 1]) for i, row in enumerate(rows)]
