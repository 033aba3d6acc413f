"""The arrays of one step of an engine, packed into one array of int32 words. A step has decoding rows, rows whose drafts are verified,
and prompt rows.

Programs are compiled for `StepSizes`. The host fills the words (`infer.engine.batch`), one transfer brings them to the device, and
`read_step` unpacks them there. If requests have inputs besides token ids (`models.parts.inputs`), the step has other sizes: its words
also hold rotary positions (`axes`) and a mask of the tokens whose embeddings are replaced (`overlay`). These embeddings come as a
second array (`read_overlaid_step`). Steps of text alone have smaller programs without all this.
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
    """The sizes of the page tables of a sequence.

    page: tokens per page.
    pages: the most pages of a sequence.
    windows: the sliding windows whose layers have page tables of their own.
    """

    page: int
    pages: int
    windows: tuple[AttentionWindow, ...] = ()


class StepSizes(NamedTuple):
    """The sizes that a step is compiled for.

    decodes: number of decoding rows.
    rows: number of prompt rows.
    width: number of tokens in a prompt row.
    tables: the sizes of the page tables of a row.
    drafted: number of rows whose drafts are verified.
    draft_width: number of tokens in a row with drafts.
    steps: number of decode steps in one dispatch; above 1, there are decoding rows only.
    axes: number of axes of rotary positions; 0: the positions are the tokens' indices.
    overlay: whether embeddings of prompt tokens may be replaced.
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
        """The length of the array of words."""
        return sum(math.prod(shape) for part in part_shapes(self) for shape in part.values())

    @property
    def text(self) -> "StepSizes":
        """The sizes of the same step with text alone, for which the layers are compiled."""
        return self._replace(axes=0, overlay=False) if self.axes or self.overlay else self

    @property
    def tokens(self) -> int:
        return self.decodes + self.drafted * self.draft_width + self.rows * self.width


@cache
def part_shapes(sizes: StepSizes) -> tuple[dict[str, tuple[int, ...]], ...]:
    """The shapes of the arrays by name, for decoding rows, drafted rows and prompt rows.

    slot: the slot of each row; -1: an unused row.
    length: number of tokens of the sequence that are computed before this step.
    table: the pages of the sequence.
    window0, first0: the pages that layers with the first sliding window read, and the page number of the first of them. Likewise for
        further windows.
    new: number of the row's tokens that count.
    tokens: the token ids.
    steps: number of steps that each decoding row takes.
    rotary: the rotary positions of each token.
    overlay: 1 for a token whose embedding is replaced.
    """

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
    """The array of words of a step whose rows are all unused."""
    words = np.zeros(sizes.words, np.int32)
    for part in split_words(words, sizes):
        for name, a in part.items():
            if name.startswith(("slot", "table", "window")):
                a[:] = -1
    return words


def split_words(words: Any, sizes: StepSizes) -> tuple[dict[str, Any], ...]:
    """Splits the words of a step into the arrays of `part_shapes`, for decoding rows, drafted rows and prompt rows. They are views if
    `words` is a NumPy array."""
    at = 0

    def take(shape: tuple[int, ...]) -> Any:
        nonlocal at
        size = math.prod(shape)
        part = words[at : at + size].reshape(shape)
        at += size
        return part

    return tuple({name: take(shape) for name, shape in part.items()} for part in part_shapes(sizes))


def read_step(last: Array, words: Array, sizes: StepSizes, step: Array | int = 0) -> tuple[Int[Array, "B T"] | Inputs, Ragged]:
    """Unpacks a step on the device. Returns its tokens [1 tokens], with rotary positions if these have several axes, and its attention
    strategy.

    Args:
        last: the token sampled last in each slot [N], which a decoding row computes.
        step: index of this step among the steps of the dispatch.
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
    """As `read_step`, but the embeddings of some prompt tokens are replaced.

    Args:
        embeddings: an embedding for every token of the prompt rows. Only those are read whose tokens have 1 in `overlay`.
    """
    tokens, attend = read_step(last, words, sizes)
    where = split_words(words, sizes)[2]["overlay"].reshape(1, -1) > 0
    before = sizes.tokens - where.shape[1]
    overlay = Overlay(jnp.pad(embeddings, ((0, 0), (before, 0), (0, 0))), jnp.pad(where, ((0, 0), (before, 0))))
    return as_inputs(tokens)._replace(overlay=overlay), attend
