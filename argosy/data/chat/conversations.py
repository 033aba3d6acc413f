"""Encodes records for fine-tuning: conversations with a chat template, and prompts with completions as plain text.

The learned tokens are the words of an assistant with the token that ends the turn, or a completion with the end-of-sequence token. The
ids before them are those of inference. Messages get a beginning-of-sequence token only from the template, as in `lm.chat`. A prompt
gets one if the tokenizer adds it, as in `lm.generate`. As in TRL, a pair of texts is never rendered by a chat template. An Alpaca
record becomes messages if there is a template, and Stanford's text otherwise.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.data.chat import template as chat
from argosy.data.chat.mask import Ids, MaskedConversation, Way, encode_all, encode_spans
from argosy.data.chat.omissions import extra_fields, writes_field
from argosy.data.chat.template import choose_template
from argosy.data.encode import DocumentEncoder
from argosy.data.encoding import ALPACA, TEMPLATE_HINT, Encoding
from argosy.data.pack import Encoded
from argosy.data.sources import Document, Source, SourceRecord
from argosy.data.sources.labeled import COMPARED, NEGATIVES
from argosy.data.sources.records import LABELED
from argosy.data.tokenizers.config import DEFAULT

if TYPE_CHECKING:
    from argosy.data.tokenizers.load import Tokenizer

# The date that templates write, so that a corpus is the same on every day. Llama 3's templates write this date if they get no clock.
CLOCK = datetime(2024, 7, 26)
RECORDS_VERSION = 3


class ConversationEncoder(DocumentEncoder):
    """Encodes documents that hold records, and counts over the records so far.

    read: number of records.
    unanswered: number of records that are left out because none of their tokens is learned.
    endless: number of conversations whose last completion does not end with a special token, so that a model does not learn to stop.
    toolless: number of conversations with tools that the chat template does not write.
    unwritten: names of fields of messages that the chat template does not write.
    unread: names in `chat_template_kwargs` that the chat template does not read.
    """

    counted = (*DocumentEncoder.counted, "read", "unanswered", "endless", "toolless", "unwritten", "unread")

    def __init__(self, encoding: Encoding):
        """Raises:
        BadInput: there is no chat template of the name in `encoding`.
        """
        super().__init__(encoding)
        self.learn, self.bos_first = encoding.learn, bool(encoding.bos)
        self.templates, self.name = encoding.chat_templates
        self.way = Way(self.templates, self.name, CLOCK, masked=self.learn == "answers")
        self.read = self.unanswered = self.endless = self.toolless = 0
        self.unwritten, self.unread = set[str](), set[str]()
        # (template, field) -> whether the template writes that field of messages.
        self._writes: dict[tuple[str, str], bool] = {}

    def encode(self, documents: list[Document]) -> Iterator[Encoded]:
        """Encodes records, and yields one result each, in order. The result is empty for a record that is left out.

        Raises:
            BadInput: the template refuses a record, or does not write the assistant's words. The message names the file and line.
        """
        records = [document.record for document in documents if document.record is not None]
        chats = encode_all(self.tokenizer, [self.conversation(record) for record in records if self.is_chat(record)], self.way)
        for record in records:
            is_chat = self.is_chat(record)
            content = next(chats) if is_chat else self.completion(record)
            if isinstance(content, BadInput):
                where = f"{record.where}: {content.where}" if content.where else record.where
                raise BadInput(content.what, where=where, hint=content.hint)
            self.read += 1
            if self.learn == "answers" and not says_something(record):
                self.unanswered += 1
                yield NOTHING
                continue
            yield self.finished(self.weighted(content, record, is_chat), is_chat, weighted=record.weights is not None)

    def skip(self, document: Document) -> None:
        """Skips a record. Only names of special tokens in its texts are counted."""
        if document.record is not None and document.record.messages is None:
            self._look_for_names(document.record.words, ends=True)

    def close(self) -> None:
        chat.close_all()

    def is_chat(self, record: SourceRecord) -> bool:
        """Whether a record is rendered by a chat template.

        Raises:
            BadInput: the record can only be rendered by a template, and there is none.
        """
        if self.templates and record.messages is not None:
            return True
        if record.prompt is None:
            if self.name == ALPACA:
                problem = "messages, and instructions with a system message or earlier turns, do not fit Alpaca's text"
                raise BadInput(problem, where=record.where, hint="leave `data.template` out")
            raise BadInput("messages need a chat template, and this tokenizer has none", where=record.where, hint=TEMPLATE_HINT)
        return False

    def conversation(self, record: SourceRecord) -> MaskedConversation:
        if record.tools and "tools" not in choose_template(self.templates, name=self.name, tools=True):
            self.toolless += 1
        if record.variables:
            template = choose_template(self.templates, name=self.name, tools=bool(record.tools))
            self.unread |= {name for name in record.variables if name not in template}
        for message in record.messages or ():
            for name in extra_fields(message):
                if not self._is_written(name, bool(record.tools)):
                    self.unwritten.add(name)
        return MaskedConversation(record.messages or (), record.tools, record.variables, self.learned_of(record))

    def learned_of(self, record: SourceRecord) -> tuple[float, ...] | None:
        """The weight of each message, if messages have weights; else whether each message counts in the loss. None: all count.

        Raises:
            BadInput: messages have weights, but `learn` is `all`.
        """
        weights = message_weights(record)
        if weights is None:
            return record.learned
        if self.learn == "all":
            problem = "weights of messages, and data.learn=all learns what stands between them too"
            hint = "leave `data.learn` out, or give a weight for the record or for each token"
            raise BadInput(problem, where=record.where, hint=hint)
        return tuple(weight * counts for weight, counts in zip(weights, record.learned or (True,) * len(weights)))

    def weighted(self, token_ids: Ids, record: SourceRecord, is_chat: bool) -> Ids:
        """Replaces the mask of the ids by weights, if the record has one weight for all ids or one for each.

        Raises:
            BadInput: the number of weights is neither the number of messages nor the number of tokens.
        """
        ids, mask = token_ids
        if record.weights is None or (is_chat and message_weights(record) is not None):
            return token_ids
        if isinstance(record.weights, tuple) and len(record.weights) != len(ids):
            count = f"{plural(len(record.weights), 'weight')} for a record of {plural(len(ids), 'token')}"
            count += f" and {plural(len(record.messages), 'message')}" if is_chat and record.messages is not None else ""
            raise BadInput(count, where=record.where, hint="one number, or one for each message or each token of the rendered text")
        each = record.weights if isinstance(record.weights, tuple) else [record.weights] * len(ids)
        return ids, [weight if counts or self.learn == "all" else 0.0 for weight, counts in zip(each, mask)]

    def _is_written(self, field: str, tools: bool) -> bool:
        """Whether the chat template writes a field of messages. `tools`: whether the conversation has tools."""
        template = choose_template(self.templates, name=self.name, tools=tools)
        if (template, field) not in self._writes:
            self._writes[template, field] = writes_field(
                lambda messages: chat.render(template, messages, self.tokenizer.special, now=CLOCK), field
            )
        return self._writes[template, field]

    def completion(self, record: SourceRecord) -> Ids:
        """Encodes a prompt and its completion. Names of special tokens are ordinary text, unless `special` is set."""
        prompt, answer = record.prompt or "", record.completion or ""
        span = [(len(prompt), len(prompt) + len(answer))] if answer else []
        self._look_for_names(prompt + answer, ends=True)
        return encode_spans(self.tokenizer, prompt + answer, span, special=self.special)

    def finished(self, token_ids: Ids, is_chat: bool, ends: bool = True, weighted: bool = False) -> Encoded:
        """Adds the special tokens around encoded content, and makes the weights of all tokens.

        Args:
            token_ids: the ids, and the mask or weight of each.
            is_chat: whether a chat template has rendered the content. It then gets no end-of-sequence token.
            ends: whether the document ends with this content.
            weighted: whether the mask holds weights.
        """
        ids, mask = token_ids
        if not ids or ((self.learn == "answers" or weighted) and not any(mask)):
            self.unanswered += 1
            return NOTHING
        if is_chat and self.learn == "answers":
            last = next(token for token, learned in zip(reversed(ids), reversed(mask)) if learned)
            self.endless += last not in self.tokenizer.hidden
        before = self.before if (self.bos_first or not is_chat) and ids[:1] != self.before else []
        after = self.after if ends and not is_chat and [ids[-1]] != self.after else []
        tokens = self._checked([*before, *ids, *after])
        if self.learn == "all" and not weighted:
            return Encoded(tokens)
        learned = [*[False] * len(before), *mask, *mask[-1:] * len(after)]
        return Encoded(tokens, np.array(learned, np.float32 if weighted else np.uint8))


def message_weights(record: SourceRecord) -> tuple[float, ...] | None:
    """The weights of a record's messages; None if the record has other weights or no weights."""
    has = record.messages is not None and isinstance(record.weights, tuple) and len(record.weights) == len(record.messages)
    return record.weights if has else None  # type: ignore[return-value]


# The result for a record that is left out.
NOTHING = Encoded(np.zeros(0, np.uint16), np.zeros(0, np.uint8), begins=False)


def says_something(record: SourceRecord) -> bool:
    """Whether a learned message of the assistant holds words, a tool call, or anything else that a template writes. An empty message
    would teach a model to end its turn at once. True for records of plain text, which are checked by their tokens.
    """
    if record.messages is None:
        return True
    learned = record.learned or [True] * len(record.messages)
    messages = [message for message, counts in zip(record.messages, learned) if counts and message.get("role") == "assistant"]
    return any(str(value).strip() for message in messages for name, value in message.items() if name not in ("role", "name") and value)


def with_template(tokenizer: "Tokenizer", template: str | None) -> "Tokenizer":
    """Makes a published template, or one from a file, the default template of the tokenizer. The tokenizer is changed in place and
    returned."""
    templates, name = Encoding(tokenizer, template=template).chat_templates
    if template is not None and name is None:
        tokenizer.config = replace(tokenizer.config, templates={**tokenizer.chat_templates, **templates})
        tokenizer.chat_templates, tokenizer.chat_template = dict(tokenizer.config.templates), templates[DEFAULT]
    return tokenizer


def record_identity(source: Source, encoding: Encoding) -> dict[str, Any]:
    """The part of a fingerprint that decides the tokens of records: which tokens are learned, the templates, and RECORDS_VERSION.

    RECORDS_VERSION is raised when the code that reads records changes, so that older corpora in the cache are not reused.
    """
    if source.format == "text":
        return {}
    if source.format in LABELED:
        counted: dict[str, Any] = {"negatives": encoding.negatives} if source.format == NEGATIVES else {}
        counted |= {"blanks": "left out"} if source.format in COMPARED else {}
        counted |= {"prompts": json.dumps(dict(encoding.prompts), sort_keys=True)} if encoding.prompts else {}
        return {"labels": json.dumps(list(encoding.labels))} | ({"learn": "all"} if encoding.learn == "all" else {}) | counted
    return {"learn": encoding.learn, "template": encoding.template_hash, "records": RECORDS_VERSION}


def record_counts(encoder: DocumentEncoder, source: Source) -> dict[str, Any]:
    """The counts over all records for the manifest of a corpus; empty for text."""
    ignored = [*source.ignored, *(["tools"] if getattr(encoder, "toolless", 0) else [])]
    ignored += [f"{name} of messages" for name in sorted(getattr(encoder, "unwritten", ()))]
    ignored += [f"{name} of chat_template_kwargs" for name in sorted(getattr(encoder, "unread", ()))]
    counts: dict[str, Any] = {"ignored": ignored} if ignored else {}
    if (read := getattr(encoder, "read", None)) is not None:
        rendered = encoder.encoding.rendering(source.format)
        counts |= {"read": read, "unanswered": getattr(encoder, "unanswered", 0), "rendered": rendered, "learn": encoder.encoding.learn}
        counts |= {"endless": endless} if (endless := getattr(encoder, "endless", 0)) else {}
        counts |= {"identical": identical} if (identical := getattr(encoder, "identical", 0)) else {}
        counts |= {"surplus": surplus} if (surplus := getattr(encoder, "surplus", 0)) else {}
        counts |= {"absent": absent} if (absent := getattr(encoder, "absent", 0)) else {}
    return counts


def nothing_to_learn(encoder: DocumentEncoder, where: str) -> BadInput | None:
    """The error for data in which all records were left out; None if the encoder has left out no record."""
    if not isinstance(encoder, ConversationEncoder):
        return None
    if identical := getattr(encoder, "identical", 0):
        have = "has" if identical == 1 else "have"
        problem = f"of {plural(encoder.read, 'pair')}, {identical:,} {have} a rejected answer equal to the chosen one"
        problem += f" and {encoder.unanswered:,} an empty answer" if encoder.unanswered else ""
        return BadInput(problem, where=where, hint="are both columns the right ones? `data.columns.rejected=NAME` reads another")
    if not encoder.unanswered:
        return None
    problem = f"none of {plural(encoder.unanswered, 'record')} has an answer to learn"
    return BadInput(problem, where=where, hint="`data.learn=all` learns every token")


