"""The names of axes, and the letters that stand for them in equations and shapes.

So the equation of a weight, "BTD,DNH->BTNH", fixes its logical axes, and `parallel.rules` maps these to a mesh. A letter is short for a
name within one file. Most files use the letters below. A file that needs others has its own legend, and passes it to its weights. Code
that handles weights of all models (sharding, adapters, scales, optimizers) uses the names, or a property of the contraction.
"""

from collections.abc import Iterable

# The letters that stand for other axes in one file than in `LEGEND`, as pairs of a letter and a name.
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
    "Q": "query_latent",  # latent attention: rank of queries
    "P": "rotary",  # the dimensions of a head that rope rotates, if they are separate from the others
    "C": "query_head",  # a head with both kinds of dimensions, H + P
    "A": "positions",  # rows of a learned position embedding
    "Y": "token_types",  # rows of a learned token type embedding (which of two texts a token belongs to)
    "O": "pooled",  # the output of an encoder's pooler
    "W": "conv",  # kernel size of a short convolution
    "I": "index_heads",  # heads of the index of sparse attention
    "J": "index",  # size of such a head
    "L": "layers",
    "Z": "scores",  # outputs of a head that scores sequences instead of predicting tokens
}

# Axes along which rows are looked up; no product sums over them.
LOOKED_UP = frozenset(("vocab", "positions", "token_types", "classes"))


def named_axes(letters: Iterable[str], legend: Legend = ()) -> tuple[str, ...]:
    """The names of axes by their letters. A letter that is in no legend is its own name."""
    names = dict(legend)
    return tuple(names.get(letter) or LEGEND.get(letter, letter) for letter in letters)
