"""Reads prompts with the completions that the data has, for training that may also sample completions from the model.

A record becomes tokens as in fine-tuning. The completion of a conversation is its last learned turn, with the token that ends the turn.
The text before the completion is the prompt, exactly as in inference. Later messages are dropped. Records are held in memory, and are
rendered when they are asked for. The data may also be prompts alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from argosy.core.errors import BadInput
from argosy.data.batch import Fingerprint
from argosy.data.chat.conversations import ConversationEncoder
from argosy.data.encoding import Encoding
from argosy.data.order import Order, check_blocks
from argosy.data.prepare import HeldOut
from argosy.data.rows.prompts import OF_ROWS, Prompt, Prompts
from argosy.data.settings import DataSettings
from argosy.data.sources import Document, Source, SourceRecord
from argosy.data.sources.find import find_source
from argosy.data.sources.records import GROUPS, PROMPT

if TYPE_CHECKING:
    from argosy.data.tokenizers.load import Tokenizer


@dataclass(frozen=True)
class Answered:
    """A prompt and its completion.

    prompt: the prompt.
    answer: the token ids of the completion, with the token that ends it; None: the data has no completions.
    """

    prompt: Prompt
    answer: Sequence[int] | None = None


class AnsweredPrompts:
    """Prompts with completions in the order of a run, like `Prompts`.

    Args:
        prompts: the records and their order. It also renders prompts that have no completion.
        encoder: encodes prompts with completions; None: the data has no completions.
    """

    def __init__(self, prompts: Prompts, encoder: ConversationEncoder | None):
        self.prompts, self.encoder = prompts, encoder
        self.fingerprint, self.source, self.most = prompts.fingerprint, prompts.source, prompts.most

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def special_names(self) -> dict[str, int]:
        """The same as `Prompts.special_names`."""
        return self.prompts.special_names

    @property
    def ignored(self) -> tuple[str, ...]:
        """The same as `Prompts.ignored`."""
        return self.prompts.ignored

    @property
    def placeholders(self) -> tuple[str, ...]:
        """The same as `Prompts.placeholders`."""
        return self.prompts.placeholders

    @property
    def has_answers(self) -> bool:
        return self.encoder is not None

    @property
    def conversations(self) -> bool:
        """Whether some prompts are lists of messages, and not texts."""
        return any(record.messages is not None for record in self.prompts.records)

    def __call__(self, first: int, count: int) -> list[Answered | str]:
        """Returns `count` items from index `first` on, or fewer at the end of the order. Instead of a record in which no token is
        learned, its file and line are returned, as a string.

        Raises:
            BadInput: a template refuses a record, there is no template, or a prompt is empty; the message names the record.
        """
        if self.encoder is None:
            return [Answered(prompt) for prompt in self.prompts(first, count)]
        of = self.prompts
        count = count if of.most is None else min(count, of.most - first)
        rows = of.order(np.arange(first, first + max(count, 0)))
        records = [of.records[row] for row in rows.tolist() if row >= 0]
        results = self.encoder.encode([Document(record=record) for record in records])
        pairs = zip(records, results, strict=True)
        return [divide_answer(record, encoded) if len(encoded.tokens) else record.where for record, encoded in pairs]


def divide_answer(record: SourceRecord, encoded: Any) -> Answered:
    """Divides the encoded tokens of a record into prompt and completion.

    Args:
        encoded: the `Encoded` tokens of the record, with weights.

    Raises:
        BadInput: there are no tokens before the completion.
    """
    ids, learned = encoded.tokens.tolist(), np.flatnonzero(encoded.weights)
    end = begin = int(learned[-1])
    while begin and encoded.weights[begin - 1]:
        begin -= 1
    if not begin:
        raise BadInput("an answer without a prompt", where=record.where, hint="data.bos=true begins it with that token")
    question: Any = record.prompt
    if record.messages is not None:
        of = record.learned or [True] * len(record.messages)
        replies = [i for i, message in enumerate(record.messages) if message.get("role") == "assistant" and of[i]]
        question = record.messages[: replies[-1]] if replies else record.messages
    prompt = Prompt(question or "", ids[:begin], {}, record.where, tools=record.tools, variables=record.variables)
    return Answered(prompt, ids[begin : end + 1])


def answered_prompts(
    settings: DataSettings, tokenizer: "Tokenizer", seed: int
) -> tuple[AnsweredPrompts, AnsweredPrompts | None]:
    """Reads all records. Returns the prompts for training, in the order of a run, and the held-out prompts, in the order of the file
    (None: no prompts are held out).

    Raises:
        BadInput: there is no file, there are no records, records have another format, or settings do not apply to sampled completions.
    """
    check_settings(settings)
    source = find_source(settings)
    where = f"data.source={settings.source_name}"
    if not isinstance(source, Source) or source.format in ("text", *GROUPS):
        has = "no prompts" if not isinstance(source, Source) else f"`{source.format}` records"
        hint = "prompts with completions, conversations, or prompts alone with data.format=prompt"
        raise BadInput(f"the student answers prompts, and this data has {has}", where=where, hint=hint)
    chooser, records, others = HeldOut(settings.held_out), list[SourceRecord](), list[SourceRecord]()
    for document in source.documents():
        assert document.record is not None
        (others if chooser.takes(document) else records).append(document.record)
    if not records:
        raise BadInput("no prompts", where=where, hint="the file is empty")
    seed = seed if settings.seed is None else settings.seed
    fingerprint: Fingerprint = source.fingerprint() | {"held_out": settings.held_out, "tokenizer": tokenizer.fingerprint}
    encoding = Encoding.of_settings(tokenizer, settings)
    fingerprint |= {"template": encoding.template_hash, "bos": settings.bos, "special": settings.special}
    check_blocks(settings, "alone", "prompts")
    fingerprint |= {"seed": seed, "shuffle": settings.shuffle, "format": source.format}

    def read(some: list[SourceRecord], order: Order, most: int | None = None) -> AnsweredPrompts:
        prompts = Prompts(some, encoding, order, fingerprint, settings.source_name, most)
        return AnsweredPrompts(prompts, None if source.format == PROMPT else ConversationEncoder(encoding))

    most = None if settings.epochs is None else int(settings.epochs * len(records))
    trained = read(records, Order(len(records), seed if settings.shuffle else None), most)
    return trained, read(others, Order(len(others), None, repeats=False)) if others else None


def check_settings(settings: DataSettings) -> None:
    """Checks that no setting is set that would be ignored.

    Raises:
        BadInput: such a setting is not at its default.
    """
    fields = type(settings).model_fields
    for name in OF_ROWS:
        if name in fields and getattr(settings, name) != fields[name].default:
            problem = f"data.{name} is for rows of given answers, and here the student answers prompts"
            raise BadInput(problem, hint=f"leave `data.{name}` out; objective=distill learns from given answers alone")
