"""The arrays of one step of an engine, as one array of words: rows that decode, rows whose drafts are verified, rows of prompts.

Programs are compiled for `StepSizes`. The host fills the words (`infer.engine.batch`), one transfer brings them to the device, and
`read_step` reads them there. A step whose requests have inputs besides token ids (`models.parts.inputs`) has sizes of its own: its
words hold rotary positions (`axes`), and say which tokens have embeddings (`overlay`), which come as a second array
(`read_overlaid_step`). So a step of text has the program that it would have without them.
"""

import math
from functools import cache
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from argosy.models.parts.attention.attend import Paged
from argosy.models.parts.attention.cache import AttentionWindow
from argosy.models.parts.attention.ragged import Ragged
from argosy.models.parts.inputs import Inputs, Overlay, as_inputs


class PageTables(NamedTuple):
    """The page tables of a sequence.

    page: tokens of a page.
    pages: pages of a sequence, at most.
    windows: windows whose layers have page tables of their own.
    """

    page: int
    pages: int
    windows: tuple[AttentionWindow, ...] = ()


class StepSizes(NamedTuple):
    """The sizes that a step is compiled for.

    decodes: decoding rows.
    rows: prompt rows.
    width: tokens of a prompt row.
    tables: the page tables of a row.
    drafted: rows whose drafts are verified.
    draft_width: tokens of such a row.
    steps: decode steps that follow one another, without any other rows.
    axes: axes of rotary positions; 0 if they are the places of tokens.
    overlay: whether tokens of prompt rows have embeddings in place of those of their ids.
    """

    decodes: int
    rows: int
    width: int
    tables: PageTables
    drafted: int = 0
    draft_width: int = 0
    steps: int = 1
    axes: int = 0
    overlay: bool = False

    @property
    def words(self) -> int:
        """Length of the array that describes a step."""
        return sum(math.prod(shape) for part in part_shapes(self) for shape in part.values())

    @property
    def text(self) -> "StepSizes":
        """The sizes that the layers are compiled for: those of a step of text."""
        return self._replace(axes=0, overlay=False) if self.axes or self.overlay else self

    @property
    def tokens(self) -> int:
        return self.decodes + self.drafted * self.draft_width + self.rows * self.width


@cache
def part_shapes(sizes: StepSizes) -> tuple[dict[str, tuple[int, ...]], ...]:
    """Shapes of the arrays of decoding rows, drafted rows and prompt rows, in the order of their tokens. `window0` is the table of the
    first window, from the page of number `first0` on; `steps` says how many steps each decoding row takes; `rotary` has the rotary
    positions of each token, and `overlay` is 1 where a token has an embedding in place of its id's."""

    def part(B: int, width: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"slot": (B,), "length": (B,), "table": (B, sizes.tables.pages)}
        for i, window in enumerate(sizes.tables.windows):
            shapes |= {f"first{i}": (B,), f"window{i}": (B, window.pages(width, sizes.tables.page))}
        return shapes

    def rotary(B: int, width: int) -> dict[str, tuple[int, ...]]:
        return {"rotary": (B, width, sizes.axes)} if sizes.axes else {}

    def wider(B: int, width: int) -> dict[str, tuple[int, ...]]:
        return part(B, width) | {"new": (B,), "tokens": (B, width)} | rotary(B, width)

    decodes = part(sizes.decodes, sizes.steps) | ({"steps": (sizes.decodes,)} if sizes.steps > 1 else {}) | rotary(sizes.decodes, 1)
    prompts = wider(sizes.rows, sizes.width) | ({"overlay": (sizes.rows, sizes.width)} if sizes.overlay else {})
    return decodes, wider(sizes.drafted, sizes.draft_width), prompts


def empty_words(sizes: StepSizes) -> Int[np.ndarray, " words"]:
    """The array of a step whose rows belong to no sequence."""
    words = np.zeros(sizes.words, np.int32)
    for part in split_words(words, sizes):
        for name, a in part.items():
            if name.startswith(("slot", "table", "window")):
                a[:] = -1
    return words


def split_words(words: Any, sizes: StepSizes) -> tuple[dict[str, Any], ...]:
    """The arrays of a step within its `words`, for decoding rows, drafted rows and prompt rows, in the order of their tokens: views,
    if `words` is a NumPy array."""
    at = 0

    def take(shape: tuple[int, ...]) -> Any:
        nonlocal at
        size = math.prod(shape)
        part = words[at : at + size].reshape(shape)
        at += size
        return part

    return tuple({name: take(shape) for name, shape in part.items()} for part in part_shapes(sizes))


def read_step(last: Array, words: Array, sizes: StepSizes, step: Array | int = 0) -> tuple[Int[Array, "B T"] | Inputs, Ragged]:
    """The tokens of a step [1 tokens], with their rotary positions where they have several axes, and its strategy of attention.

    Args:
        last: the token sampled last in each slot [N], which a decoding row computes.
        step: the number of this step, of several.
    """
    d, *wider = split_words(words, sizes)
    groups, flat, rotary = [], [], []
    if "steps" in d:
        d |= {"slot": jnp.where(step < d["steps"], d["slot"], -1), "length": d["length"] + step}
    if "rotary" in d:
        d |= {"rotary": d["rotary"] + step}

    def group(rows: dict[str, Array], new: Array, width: int) -> None:
        windows = {w: (rows[f"first{i}"], rows[f"window{i}"]) for i, w in enumerate(sizes.tables.windows)}
        t = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (len(new), width))
        groups.append(Paged(rows["table"], rows["slot"], rows["length"], new, t, windows=windows))
        if sizes.axes:
            rotary.append(rows["rotary"].reshape(-1, sizes.axes))

    if sizes.decodes:
        group(d, (d["slot"] >= 0).astype(jnp.int32), 1)
        flat.append(jnp.take(last, d["slot"], mode="clip"))
    for rows in wider:
        if rows["tokens"].size:
            group(rows, rows["new"], rows["tokens"].shape[1])
            flat.append(rows["tokens"].reshape(-1))
    ids, attend = jnp.concatenate(flat)[None], Ragged(tuple(groups))
    return Inputs(ids, positions=jnp.concatenate(rotary)[None]) if rotary else ids, attend


def read_overlaid_step(
    last: Array, words: Array, embeddings: Float[Array, "1 prompts D"], sizes: StepSizes
) -> tuple[Inputs, Ragged]:
    """As `read_step`, but some tokens of the prompt rows have a given embedding instead of their id's.

    Args:
        embeddings: embedding of every token of the prompt rows; ignored for tokens that use their id's embedding.
    """
    tokens, attend = read_step(last, words, sizes)
    where = split_words(words, sizes)[2]["overlay"].reshape(1, -1) > 0
    before = sizes.tokens - where.shape[1]
    overlay = Overlay(jnp.pad(embeddings, ((0, 0), (before, 0), (0, 0))), jnp.pad(where, ((0, 0), (before, 0))))
    return as_inputs(tokens)._replace(overlay=overlay), attend
