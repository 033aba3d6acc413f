"""The special tokens around a text, or a pair of texts, that is embedded or scored.

    encoders     [CLS] a [SEP]        [CLS] a [SEP] b [SEP]        RoBERTa: <s> a </s></s> b </s>
    decoders     <bos> a <eos>        <bos> a <bos> b <eos>        without <bos> or <eos> where the tokenizer adds none

The tokenizers of transformers add the same special tokens. A tokenizer with both `cls_token` and `sep_token` belongs to an encoder.
"""

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from argosy.data.tokenizers import Tokenizer


class TextFrame(NamedTuple):
    """The special tokens around texts.

    first: ids before the first text.
    between: ids between two texts.
    last: ids after the last text.
    """

    first: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    last: tuple[int, ...] = ()


def frame_of(tokenizer: "Tokenizer", bos: bool | None = None) -> TextFrame:
    """The special tokens around texts that the tokenizer's model was trained with.

    Args:
        bos: whether texts begin with the beginning-of-sequence token; None: as the tokenizer does. Ignored for encoders.
    """
    roles = [tokenizer.special.get(role, "") for role in ("cls_token", "sep_token")]
    ids = [tokenizer.encode(text, special=True) if text else [] for text in roles]
    if all(len(some) == 1 for some in ids):
        (first,), (last,) = ids
        # RoBERTa's tokens are called <s> and </s>, and the second stands twice between texts.
        return TextFrame((first,), (last, last) if roles[1] == "</s>" else (last,), (last,))
    puts = tokenizer.adds_bos if bos is None else bos
    begin = (tokenizer.bos,) if puts and tokenizer.bos is not None else ()
    return TextFrame(begin, begin, tokenizer.ending)


def frame_ids(
    frame: TextFrame, text: Sequence[int], pair: Sequence[int] | None = None, most: int | None = None
) -> tuple[list[int], int]:
    """Adds the special tokens to a text or to a pair of texts.

    Args:
        frame: the special tokens.
        text: the ids of the first text.
        pair: the ids of the second text; None: there is only one.
        most: the largest number of ids to return. The end of the longer text is cut first, as in transformers' `longest_first`.

    Returns:
        The ids, and the index where the second text begins, which is 0 if there is only one text.
    """
    text, other = list(text), list(pair or ())
    room = None if most is None else most - len(frame.first) - len(frame.last) - (0 if pair is None else len(frame.between))
    if room is not None and len(text) + len(other) > room:
        # Both lose their end until they are equally long, then each as much.
        half = max(room // 2, 0)
        text_length = max(room - len(other), half + room % 2 if len(text) >= len(other) else half)
        text = text[: max(text_length, 0)]
        other = other[: max(room - len(text), 0)]
    if pair is None:
        return [*frame.first, *text, *frame.last], 0
    head = [*frame.first, *text, *frame.between]
    return [*head, *other, *frame.last], len(head)


def unescape_text(text: str) -> str:
    """Replaces the HTML entities of a text (`&amp;`) twice, and each run of white space by one blank, as pipelines of Wan do."""
    return " ".join(html.unescape(html.unescape(text)).split())
