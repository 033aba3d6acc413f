"""The names of axes, and the letters that stand for them in equations and shapes.

A weight's equation, "BTD,DNH->BTNH", therefore fixes its logical axes; `parallel.rules` maps those to a mesh. A letter is short for a
name within one file. Most files use the letters below; one that needs others has a legend of its own, and gives it to its weights.
Whoever acts on weights from outside (sharding, adapters, scales, optimizers) asks for names, or for a property of the contraction.
"""

from collections.abc import Iterable

# Letters of one file that stand for other axes than in `LEGEND`: pairs of a letter and a name.
Legend = tuple[tuple[str, str], ...]

LEGEND: dict[str, str] = {
    "B": "batch",
    "T": "time",  # query positions
    "S": "memory",  # key positions
    "D": "embed",  # width of the residual stream
    "F": "ffn",
    "N": "heads",  # query heads
    "K": "kv_heads",
    "G": "group",  # query heads per key head
    "H": "head",  # head size
    "U": "value",  # size of a value head, where it differs from H
    "V": "vocab",
    "E": "experts",
    "M": "expert_ffn",
    "X": "rows",  # tokens sorted by expert
    "R": "latent",  # latent attention: rank of keys and values
    "Q": "query_latent",  # and of queries
    "P": "rotary",  # the part of a head that rope turns, where it is apart
    "C": "query_head",  # a head of both parts, H + P
    "A": "positions",  # rows of a learned position embedding
    "Y": "token_types",  # rows of a learned embedding of which of two texts a token is of
    "O": "pooled",  # what an encoder's pooler makes of a sequence
    "W": "conv",  # taps of a short convolution
    "I": "index_heads",  # of the index of sparse attention
    "J": "index",  # and their size
    "L": "layers",
    "Z": "scores",  # of a head that scores sequences instead of predicting tokens
}

# Axes along which rows are looked up; no product sums over them.
LOOKED_UP = frozenset(("vocab", "positions", "token_types", "classes"))


def named_axes(letters: Iterable[str], legend: Legend = ()) -> tuple[str, ...]:
    """The names of axes, from their letters; a letter without a name stands for itself."""
    names = dict(legend)
    return tuple(names.get(letter) or LEGEND.get(letter, letter) for letter in letters)
