"""Prompts of reinforcement learning: what is asked, as token ids, with the columns that rewards read.

All records are held in memory, because their texts are small beside what is generated for them. They are rendered as they are used.
Which of them are held out depends on their own text alone, as in a corpus.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.data.batch import Fingerprint
from argosy.data.chat.conversations import CLOCK
from argosy.data.chat.omissions import extra_fields, with_known_roles, writes_field
from argosy.data.chat.template import choose_template, render
from argosy.data.encoding import TEMPLATE_HINT, Encoding
from argosy.data.order import Order
from argosy.data.prepare import HeldOut
from argosy.data.settings import DataSettings
from argosy.data.sources import Source, SourceRecord, find_source
from argosy.data.sources.records import PROMPT

if TYPE_CHECKING:
    from argosy.data.tokenizers.load import Tokenizer


PLACEHOLDER = re.compile(r"(?<![\\\w^{}$])\{([A-Za-z_]\w*)\}(?!\})")
# Prompts that are rendered between two looks at the clock.
LOOKED_AT = 64


@dataclass(frozen=True)
class Prompt:
    """One prompt as a policy reads it.

    content: the text or the messages, as in the file. tokens: what the model is fed, ready for an answer. columns: the other columns.
    place: in the order of the prompts. tools, variables: what the template reads beside messages.
    """

    content: str | Sequence[Mapping[str, Any]]
    tokens: Sequence[int]
    columns: Mapping[str, Any]
    where: str
    place: int = 0
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Prompts:
    """The prompts of a file in the order of a run: epochs follow each other, each shuffled anew.

    records: at least one. names: of all columns, in the order of their first occurrence; a record without one has None there.
    """

    records: Sequence[SourceRecord]
    encoding: Encoding
    order: Order
    fingerprint: Fingerprint
    source: str = ""
    # Places of the order before it ends; None: it does not.
    most: int | None = None
    # Tools that every prompt of messages is shown, an environment's; a record's own are an error beside them.
    tools: Sequence[Mapping[str, Any]] | None = None
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.names = tuple(dict.fromkeys(name for record in self.records for name in record.columns))
        self.tokenizer = self.encoding.tokenizer
        self.templates, self.name = self.encoding.chat_templates
        # (template, field) -> whether the template writes that field of messages.
        self._writes: dict[tuple[str, str], bool] = {}

    def __len__(self) -> int:
        return len(self.records)

    def __call__(self, first: int, count: int) -> list[Prompt]:
        """The prompts at `count` places of the order, from `first` on; fewer where the order ends.

        Raises:
            BadInput: a template refuses one, or there is none; the record is named.
        """
        count = count if self.most is None else min(count, self.most - first)
        rows = self.order(np.arange(first, first + max(count, 0)))
        found = enumerate(rows.tolist(), first)
        return [replace(self.rendered(self.records[row]), place=place) for place, row in found if row >= 0]

    @cached_property
    def special_names(self) -> dict[str, int]:
        """Names of special tokens that stay text in prompts, and how many prompts hold each one first: they were rendered by a chat
        template elsewhere. Prompts of messages have none."""
        found: dict[str, int] = {}
        pattern = self.tokenizer.special_names
        if self.encoding.special or pattern is None:
            return found
        for record in self.records:
            if record.messages is None and (name := pattern.search(record.prompt or "")):
                found[name[0]] = found.get(name[0], 0) + 1
        return found

    @cached_property
    def ignored(self) -> tuple[str, ...]:
        """What messages of prompts hold and their template leaves out, as in fine-tuning."""
        found: dict[str, None] = {}
        for record in self.records if self.templates else ():
            if record.messages is None:
                continue
            template = self.template_for(self.tools or record.tools)
            if record.tools and "tools" not in template:
                found["tools"] = None
            found |= dict.fromkeys(f"{name} of chat_template_kwargs" for name in record.variables if name not in template)
            fields = {name for message in record.messages for name in extra_fields(message)}
            found |= dict.fromkeys(f"{name} of messages" for name in sorted(fields) if not self._is_written(template, name))
        return tuple(found)

    def _is_written(self, template: str, field: str) -> bool:
        if (template, field) not in self._writes:
            special = self.tokenizer.special
            self._writes[template, field] = writes_field(lambda messages: render(template, messages, special, now=CLOCK), field)
        return self._writes[template, field]

    @cached_property
    def placeholders(self) -> tuple[str, ...]:
        """Names in braces, such as `{question}`, that every prompt holds: a text to fill in, which nothing fills. One prompt alone
        counts where a column has the name. Braces behind a letter, `\\`, `_` or `^` are LaTeX or code."""
        common: set[str] | None = None
        for record in self.records:
            texts = [record.prompt or ""] if record.messages is None else [str(one.get("content")) for one in record.messages]
            names = {name for text in texts for name in PLACEHOLDER.findall(text)}
            common = names if common is None else common & names
            if not common:
                return ()
        return tuple(sorted(name for name in common or () if len(self.records) > 1 or name in self.names))

    def rendered(self, record: SourceRecord) -> Prompt:
        """One record as token ids, and all columns."""
        columns = {name: record.columns.get(name) for name in self.names}
        if record.messages is None:
            text = record.prompt or ""
            ids = self.tokenizer.encode(text, special=self.encoding.special)
            if self.encoding.puts_bos and self.tokenizer.bos is not None and ids[:1] != [self.tokenizer.bos]:
                ids = [self.tokenizer.bos, *ids]
            if not ids:
                raise BadInput("an empty prompt", where=record.where)
            return Prompt(text, ids, columns, record.where)
        if not self.templates:
            raise BadInput("messages need a chat template, and this tokenizer has none", where=record.where, hint=TEMPLATE_HINT)
        if self.tools and record.tools:
            raise BadInput("the record has tools, and so has the environment", where=record.where, hint="leave the column `tools` out")
        tools = self.tools or record.tools
        try:
            text = self.text_of(record.messages, tools, record.variables)
        except BadInput as error:
            where = f"{record.where}: {error.where}" if error.where else record.where
            raise BadInput(error.what, where=where, hint=error.hint) from None
        ids = self.tokenizer.encode(text, special=True)
        return Prompt(record.messages, ids, columns, record.where, tools=tools, variables=record.variables)

    def text_of(self, messages: Sequence[Mapping[str, Any]], tools: Any, variables: Mapping[str, Any]) -> str:
        """A conversation as text, ready for an answer.

        Raises:
            BadInput: the template refuses it.
        """
        chosen = self.template_for(tools)
        how: dict[str, Any] = {"tools": tools, "add_generation_prompt": True, "now": CLOCK}
        return render(chosen, with_known_roles(messages, chosen), self.tokenizer.special, **how, **variables)

    def template_for(self, tools: Any) -> str:
        """The chat template of conversations with or without tools."""
        return choose_template(self.templates, name=self.name, tools=bool(tools))


@dataclass(frozen=True)
class Lengths:
    """What is known of the lengths of prompts before a run: of `looked` of `all`, how many have more than `longest` tokens."""

    longest: int
    all: int
    looked: int = 0
    long: int = 0

    def __str__(self) -> str:
        rest = "" if self.looked == self.all else f"; the other {self.all - self.looked:,} are looked at when they are reached"
        if not self.long:
            return f"{self.looked:,} prompts have room for an answer{rest}" if rest else ""
        has, is_ = ("has", "it is") if self.long == 1 else ("have", "they are")
        limit = f"{self.longest} tokens (data.sequence - rollout.tokens)"
        which = f"{self.long:,} of {plural(self.looked, 'prompt')} {has} more than {limit}"
        return f"{which} and so no room for an answer: {is_} passed over{rest}"


def lengths_of(prompts: Callable[[int, int], Sequence[Any]], count: int, longest: int, within_s: float) -> Lengths:
    """Looks at prompts in their order, for so many seconds: they are rendered as they are used, and a file may have millions.

    Args:
        prompts: (first, count) -> those at these places; what has no `tokens` and no `prompt` with them is passed over.

    Raises:
        BadInput: one cannot be rendered; the record is named.
    """
    looked = long = 0
    begun = time.monotonic()
    while looked < count and time.monotonic() - begun < within_s:
        found = prompts(looked, min(LOOKED_AT, count - looked))
        if not found:
            break
        looked += len(found)
        each = (getattr(one, "prompt", one) for one in found)
        long += sum(len(getattr(one, "tokens", ())) > longest for one in each)
    return Lengths(longest, count, looked, long)


def prompts_of(settings: DataSettings, tokenizer: "Tokenizer", seed: int) -> tuple[Prompts, Prompts | None]:
    """The prompts to train on, and those held out, in the order of the file; None if none are.

    Raises:
        BadInput: no file, no records, no prompt in one of them, or settings that mean nothing for prompts.
    """
    check_prompt_settings(settings)
    source = find_source(settings.model_copy(update={"format": PROMPT}))
    if not isinstance(source, Source) or source.format != PROMPT:
        what = "reinforcement learning reads prompts from a JSONL file, and this source has none"
        raise BadInput(what, where=f"data.source={settings.source}", hint='lines like {"prompt": "...", "answer": "..."}')
    held, records, others = HeldOut(settings.held_out), list[SourceRecord](), list[SourceRecord]()
    for document in source.documents():
        assert document.record is not None
        (others if held.takes(document) else records).append(document.record)
    if not records:
        raise BadInput("no prompts", where=f"data.source={settings.source}", hint="the file is empty")
    seed = seed if settings.seed is None else settings.seed
    made = source.fingerprint() | {"held_out": settings.held_out, "tokenizer": tokenizer.fingerprint}
    encoding = Encoding.of_settings(tokenizer, settings)
    made |= {"template": encoding.template_hash, "bos": settings.bos, "special": settings.special}
    made |= {"seed": seed, "shuffle": settings.shuffle}
    order, once = Order(len(records), seed if settings.shuffle else None), Order(len(others), None, repeats=False)
    most = None if settings.epochs is None else int(settings.epochs * len(records))
    held_out = Prompts(others, encoding, once, made, settings.source) if others else None
    return Prompts(records, encoding, order, made, settings.source, most), held_out


# Settings that say something about rows of given tokens, with their defaults.
OF_ROWS = ("packing", "too_long", "online", "learn")


def check_prompt_settings(settings: DataSettings) -> None:
    """Checks that no setting is given that would be ignored.

    Raises:
        BadInput: one is.
    """
    if settings.format not in ("auto", PROMPT):
        what = f"data.format={settings.format}, and reinforcement learning reads prompts"
        raise BadInput(what, hint="leave it out; data.columns.prompt=NAME reads the prompt from another column")
    fields = type(settings).model_fields
    for name in OF_ROWS:
        if name in fields and getattr(settings, name) != fields[name].default:
            what = f"data.{name} is for answers that are in the data, and here they are generated"
            raise BadInput(what, hint=f"leave `data.{name}` out")
