"""Prompts with the answers that the data has, for training that may answer them anew: fine-tuning data, or prompts alone.

A record becomes tokens as in fine-tuning. The answer of a conversation is the last turn that is learned, with the token that ends it;
what is before it is the prompt, exactly as inference feeds it, and what is after it is left out. Records are held in memory and
rendered as they are used.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from argosy.core.errors import BadInput
from argosy.data.batch import Fingerprint
from argosy.data.chat.conversations import ConversationEncoder
from argosy.data.encoding import Encoding
from argosy.data.order import Order
from argosy.data.prepare import HeldOut
from argosy.data.rows.prompts import OF_ROWS, Prompt, Prompts
from argosy.data.settings import DataSettings
from argosy.data.sources import Document, Source, SourceRecord, find_source
from argosy.data.sources.records import GROUPS, PROMPT

if TYPE_CHECKING:
    from argosy.data.tokenizers.load import Tokenizer


@dataclass(frozen=True)
class Answered:
    """A prompt, and the tokens of its answer with their end; None: the data has none."""

    prompt: Prompt
    answer: Sequence[int] | None = None


class AnsweredPrompts:
    """The records of a file in the order of a run, as `Prompts`.

    Args:
        prompts: the records, and how prompts alone are rendered.
        encoder: renders prompts with answers; None: the data has no answers.
    """

    def __init__(self, prompts: Prompts, encoder: ConversationEncoder | None):
        self.prompts, self.encoder = prompts, encoder
        self.fingerprint, self.source, self.most = prompts.fingerprint, prompts.source, prompts.most

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def special_names(self) -> dict[str, int]:
        """As `Prompts.special_names`."""
        return self.prompts.special_names

    @property
    def ignored(self) -> tuple[str, ...]:
        """As `Prompts.ignored`."""
        return self.prompts.ignored

    @property
    def placeholders(self) -> tuple[str, ...]:
        """As `Prompts.placeholders`."""
        return self.prompts.placeholders

    @property
    def has_answers(self) -> bool:
        return self.encoder is not None

    @property
    def conversations(self) -> bool:
        """Whether some prompts are messages, not texts."""
        return any(record.messages is not None for record in self.prompts.records)

    def __call__(self, first: int, count: int) -> list[Answered | str]:
        """What is at `count` places of the order, from `first` on; fewer where the order ends. In place of a record that has nothing to
        learn there is its file and line.

        Raises:
            BadInput: a template refuses a record, there is none, or a prompt is empty; the record is named.
        """
        if self.encoder is None:
            return [Answered(one) for one in self.prompts(first, count)]
        of = self.prompts
        count = count if of.most is None else min(count, of.most - first)
        rows = of.order(np.arange(first, first + max(count, 0)))
        records = [of.records[row] for row in rows.tolist() if row >= 0]
        found = self.encoder.encode([Document(record=one) for one in records])
        return [divided(one, encoded) if len(encoded.tokens) else one.where for one, encoded in zip(records, found, strict=True)]


def divided(record: SourceRecord, encoded: Any) -> Answered:
    """The prompt and the answer of a record's tokens.

    Raises:
        BadInput: nothing is before the answer.
    """
    ids, learned = encoded.tokens.tolist(), np.flatnonzero(encoded.weights)
    end = begin = int(learned[-1])
    while begin and encoded.weights[begin - 1]:
        begin -= 1
    if not begin:
        raise BadInput("an answer without a prompt", where=record.where, hint="data.bos=true begins it with that token")
    asked: Any = record.prompt
    if record.messages is not None:
        of = record.learned or [True] * len(record.messages)
        said = [i for i, one in enumerate(record.messages) if one.get("role") == "assistant" and of[i]]
        asked = record.messages[: said[-1]] if said else record.messages
    prompt = Prompt(asked or "", ids[:begin], {}, record.where, tools=record.tools, variables=record.variables)
    return Answered(prompt, ids[begin : end + 1])


def answered_prompts(
    settings: DataSettings, tokenizer: "Tokenizer", seed: int
) -> tuple[AnsweredPrompts, AnsweredPrompts | None]:
    """What to train on, and what is held out, in the order of the file; None if nothing is.

    Raises:
        BadInput: no file, no records, records of another kind, or settings that mean nothing for answers that may be sampled.
    """
    check_settings(settings)
    source = find_source(settings)
    where = f"data.source={settings.source}"
    if not isinstance(source, Source) or source.format in ("text", *GROUPS):
        has = "no prompts" if not isinstance(source, Source) else f"`{source.format}` records"
        hint = "prompts with completions, conversations, or prompts alone with data.format=prompt"
        raise BadInput(f"the student answers prompts, and this data has {has}", where=where, hint=hint)
    held, records, others = HeldOut(settings.held_out), list[SourceRecord](), list[SourceRecord]()
    for document in source.documents():
        assert document.record is not None
        (others if held.takes(document) else records).append(document.record)
    if not records:
        raise BadInput("no prompts", where=where, hint="the file is empty")
    seed = seed if settings.seed is None else settings.seed
    made: Fingerprint = source.fingerprint() | {"held_out": settings.held_out, "tokenizer": tokenizer.fingerprint}
    encoding = Encoding.of_settings(tokenizer, settings)
    made |= {"template": encoding.template_hash, "bos": settings.bos, "special": settings.special}
    made |= {"seed": seed, "shuffle": settings.shuffle, "format": source.format}

    def read(some: list[SourceRecord], order: Order, most: int | None = None) -> AnsweredPrompts:
        prompts = Prompts(some, encoding, order, made, settings.source, most)
        return AnsweredPrompts(prompts, None if source.format == PROMPT else ConversationEncoder(encoding))

    most = None if settings.epochs is None else int(settings.epochs * len(records))
    trained = read(records, Order(len(records), seed if settings.shuffle else None), most)
    return trained, read(others, Order(len(others), None, repeats=False)) if others else None


def check_settings(settings: DataSettings) -> None:
    """Checks that no setting is given that would be ignored.

    Raises:
        BadInput: one is.
    """
    fields = type(settings).model_fields
    for name in OF_ROWS:
        if name in fields and getattr(settings, name) != fields[name].default:
            what = f"data.{name} is for rows of given answers, and here the student answers prompts"
            raise BadInput(what, hint=f"leave `data.{name}` out; objective=distill learns from given answers alone")
