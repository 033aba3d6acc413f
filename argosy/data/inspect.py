"""Shows a batch as text for people: where documents begin, and which tokens count in the loss.

With color, learned tokens are green and the rest is dim. Without color, the rest stands in ⟦ ⟧.
"""

from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from argosy.core.counts import plural
from argosy.data.batch import Batch

if TYPE_CHECKING:
    from argosy.data.rows.prompts import Prompt
    from argosy.data.tokenizers.load import Tokenizer

GREEN, DIM, PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"
# The text may be hostile: no control character but tab and line break may reach the terminal.
ESCAPED = {c: f"\\x{c:02x}" for c in (*range(32), *range(127, 160)) if chr(c) not in "\t\n"}


def render(batch: Batch, tokenizer: "Tokenizer | None", color: bool = False, rows: int | None = None) -> str:
    """The first `rows` rows of a batch (None: all rows) as text, or as token ids if there is no tokenizer.

    A token counts in the loss if it is predicted. The first token of a segment never is.
    """
    count = len(batch["tokens"]) if rows is None else min(rows, len(batch["tokens"]))
    table = [{name: array[row] for name, array in batch.items()} for row in range(count)]
    return "\n".join(row_text(row, number, tokenizer, color) for number, row in enumerate(table))


def example(batch: Batch, tokenizer: "Tokenizer | None", most: int = 600) -> str:
    """The first sequence of each row of a batch as text. The middle of a sequence of more than `most` characters is left out."""
    parts = []
    for row in range(len(batch["tokens"])):
        fields = {name: array[row] for name, array in batch.items()}
        if not len(places := np.flatnonzero(fields["segments"] == 1)):
            # A text that the record lacks.
            continue
        text = segment_text(fields, places, tokenizer, color=False).strip("\n")
        parts.append(text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}")
    return "\n--\n".join(parts)


def prompt_text(prompt: "Prompt", tokenizer: "Tokenizer | None", most: int = 600) -> str:
    """A prompt as a model reads it, then the columns that rewards read. The middle of a prompt of more than `most` characters is left
    out."""
    text = words(list(prompt.tokens), tokenizer).translate(ESCAPED)
    text = text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"
    columns = [f"{name}: {_short(value)}".translate(ESCAPED) for name, value in prompt.columns.items()]
    return "\n".join([f"{text}⟦...⟧", *columns])


def _short(value: Any, most: int = 100) -> str:
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]} ..."


def row_text(row: Batch, number: int, tokenizer: "Tokenizer | None", color: bool) -> str:
    """One row as text: a line of counts, then each segment under a heading."""
    segments, filled = row["segments"], int((row["segments"] > 0).sum())
    counts = f"{plural(filled, 'token')}, {int((row['mask'] > 0).sum())} learned, {len(segments) - filled} padding"
    lines = [f"row {number}: {counts}"]
    for segment in range(1, int(segments.max(initial=0)) + 1):
        places = np.flatnonzero(segments == segment)
        lines += [f"-- segment {segment}: {plural(len(places), 'token')} --", segment_text(row, places, tokenizer, color)]
    return "\n".join(lines) + "\n"


def segment_text(row: Batch, places: np.ndarray, tokenizer: "Tokenizer | None", color: bool) -> str:
    """The text of one segment. Neighboring tokens that all count in the loss, or all do not, are decoded together, so that a character
    of several tokens stays whole.

    Args:
        places: the positions of the segment in its row.
    """
    last = int(places[-1])
    ids, learned = row["tokens"][places].tolist(), [False, *(row["mask"][places[:-1]] > 0).tolist()]
    if row["mask"][last] > 0:  # its last token is only a target
        ids, learned = [*ids, int(row["targets"][last])], [*learned, True]
    parts = []
    for counts, run in groupby(zip(learned, ids), key=lambda pair: pair[0]):
        text = words([token for _, token in run], tokenizer).translate(ESCAPED)
        parts.append(_marked(text, counts, color))
    return "".join(parts)


def _marked(text: str, counts: bool, color: bool) -> str:
    if color:
        return f"{GREEN if counts else DIM}{text}{PLAIN}"
    return text if counts else f"⟦{text}⟧"


def words(ids: list[int], tokenizer: "Tokenizer | None") -> str:
    """The decoded text, with special tokens written by name; the ids if there is no tokenizer."""
    if tokenizer is None:
        return "".join(f"{token} " for token in ids)
    return tokenizer.decode(ids, skip_special=False)
