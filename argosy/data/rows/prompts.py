"""Reads the prompts of reinforcement learning: their token ids, and the columns that rewards read.

All records are held in memory, because their texts are small compared with the completions. A record is rendered when it is asked for.
Whether a record is held out depends only on its own text, as in a corpus.
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
from argosy.data.mixtures.order import MixedOrder
from argosy.data.mixtures.table import check_mixture, mixed_order, part_settings
from argosy.data.order import Order, check_blocks
from argosy.data.prepare import HeldOut
from argosy.data.settings import DataSettings
from argosy.data.sources import Source, SourceRecord
from argosy.data.sources.find import find_source
from argosy.data.sources.records import PROMPT

if TYPE_CHECKING:
    from argosy.data.tokenizers.load import Tokenizer


PLACEHOLDER = re.compile(r"(?<![\\\w^{}$])\{([A-Za-z_]\w*)\}(?!\})")
# Number of prompts that are rendered between two looks at the clock.
LOOKED_AT = 64


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    content: the text or the messages, as in the file.
    tokens: the token ids of the model's input. The completion follows them directly.
    columns: the other columns of the record, by name.
    where: the file and line of the record, for errors.
    place: the index of the prompt in the order of the run.
    tools: the JSON schemas of functions, for the chat template.
    variables: further variables of the chat template.
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

    records: the records; at least one.
    encoding: the tokenizer and its settings.
    order: maps an index in the run to the number of a record.
    fingerprint: what identifies the prompts and their order.
    source: the name of the source.
    names: the names of all columns, in the order of their first occurrence. A record without a column has None as its value.
    """

    records: Sequence[SourceRecord]
    encoding: Encoding
    order: Order | MixedOrder
    fingerprint: Fingerprint
    source: str = ""
    # The number of prompts after which the order ends; None: it does not end.
    most: int | None = None
    # The tools of an environment, which every prompt of messages gets. A record may then have no tools.
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
        """Returns `count` prompts from index `first` on, or fewer at the end of the order.

        Raises:
            BadInput: a template refuses a prompt, or there is no template; the message names the record.
        """
        count = count if self.most is None else min(count, self.most - first)
        rows = self.order(np.arange(first, first + max(count, 0)))
        numbered = enumerate(rows.tolist(), first)
        return [replace(self.rendered(self.records[row]), place=place) for place, row in numbered if row >= 0]

    @cached_property
    def special_names(self) -> dict[str, int]:
        """Names of special tokens that occur in text prompts and are encoded as ordinary text. The value is the number of prompts in
        which the name is the first such name. Such prompts were probably rendered by a chat template elsewhere.
        """
        counts: dict[str, int] = {}
        pattern = self.tokenizer.special_names
        if self.encoding.special or pattern is None:
            return counts
        for record in self.records:
            if record.messages is None and (name := pattern.search(record.prompt or "")):
                counts[name[0]] = counts.get(name[0], 0) + 1
        return counts

    @cached_property
    def ignored(self) -> tuple[str, ...]:
        """Names of fields of messages and records that the chat template does not write."""
        names: dict[str, None] = {}
        for record in self.records if self.templates else ():
            if record.messages is None:
                continue
            template = self.template_for(self.tools or record.tools)
            if record.tools and "tools" not in template:
                names["tools"] = None
            names |= dict.fromkeys(f"{name} of chat_template_kwargs" for name in record.variables if name not in template)
            fields = {name for message in record.messages for name in extra_fields(message)}
            names |= dict.fromkeys(f"{name} of messages" for name in sorted(fields) if not self._is_written(template, name))
        return tuple(names)

    def _is_written(self, template: str, field: str) -> bool:
        if (template, field) not in self._writes:
            special = self.tokenizer.special
            self._writes[template, field] = writes_field(lambda messages: render(template, messages, special, now=CLOCK), field)
        return self._writes[template, field]

    @cached_property
    def placeholders(self) -> tuple[str, ...]:
        """Names in braces, such as `{question}`, that occur in every prompt, and that nothing fills in. In a file of one prompt, only
        names of columns count. Braces after a letter, `\\`, `_` or `^` are ignored, because they are LaTeX or code.
        """
        common: set[str] | None = None
        for record in self.records:
            texts = [record.prompt or ""] if record.messages is None else [str(message.get("content")) for message in record.messages]
            names = {name for text in texts for name in PLACEHOLDER.findall(text)}
            common = names if common is None else common & names
            if not common:
                return ()
        return tuple(sorted(name for name in common or () if len(self.records) > 1 or name in self.names))

    def rendered(self, record: SourceRecord) -> Prompt:
        """Renders and encodes one record. The prompt has all columns of the file.

        Raises:
            BadInput: the prompt is empty, there is no chat template, or the template refuses the messages.
        """
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
        """Renders a conversation as text that ends where the model's answer begins.

        Raises:
            BadInput: the template refuses the conversation.
        """
        template = self.template_for(tools)
        options: dict[str, Any] = {"tools": tools, "add_generation_prompt": True, "now": CLOCK}
        return render(template, with_known_roles(messages, template), self.tokenizer.special, **options, **variables)

    def template_for(self, tools: Any) -> str:
        """The chat template for conversations with or without tools."""
        return choose_template(self.templates, name=self.name, tools=bool(tools))


@dataclass(frozen=True)
class Lengths:
    """Counts of prompts that are too long, measured before a run.

    longest: the largest allowed length of a prompt, in tokens.
    all: number of prompts.
    looked: number of prompts that were measured.
    long: number of measured prompts that are longer than `longest`.
    """

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
        subject = f"{self.long:,} of {plural(self.looked, 'prompt')} {has} more than {limit}"
        return f"{subject} and so no room for an answer: {is_} passed over{rest}"


def lengths_of(prompts: Callable[[int, int], Sequence[Any]], count: int, longest: int, within_s: float) -> Lengths:
    """Measures prompts in order, for a limited time. Prompts are rendered when they are asked for, and a file may have millions.

    Args:
        prompts: (first, count) -> the items at these indices. An item without tokens has length 0.
        count: number of prompts.
        longest: the largest allowed length of a prompt, in tokens.
        within_s: time limit in seconds.

    Raises:
        BadInput: a prompt cannot be rendered; the message names the record.
    """
    looked = long = 0
    begun = time.monotonic()
    while looked < count and time.monotonic() - begun < within_s:
        batch = prompts(looked, min(LOOKED_AT, count - looked))
        if not batch:
            break
        looked += len(batch)
        each = (getattr(item, "prompt", item) for item in batch)
        long += sum(len(getattr(prompt, "tokens", ())) > longest for prompt in each)
    return Lengths(longest, count, looked, long)


def prompts_of(settings: DataSettings, tokenizer: "Tokenizer", seed: int) -> tuple[Prompts, Prompts | None]:
    """Reads all records. Returns the prompts for training, in the order of a run, and the held-out prompts, in the order of the file
    (None: no prompts are held out).

    Raises:
        BadInput: there is no file, there are no records, a record has no prompt, or settings do not apply to prompts.
    """
    check_prompt_settings(settings)
    if isinstance(settings.source, list):
        check_mixture(settings)
        parts = [part_settings(mixed, settings, format=PROMPT) for mixed in settings.source]
    else:
        parts = [settings.model_copy(update={"format": PROMPT})]
    sizes, records, others = list[int](), list[SourceRecord](), list[SourceRecord]()
    fingerprint: Fingerprint = {}
    for number, part in enumerate(parts):
        source = find_source(part)
        if not isinstance(source, Source) or source.format != PROMPT:
            problem = "reinforcement learning reads prompts from files of records, and this source has none"
            raise BadInput(problem, where=f"data.source={part.source_name}", hint='lines like {"prompt": "...", "answer": "..."}')
        chooser, before = HeldOut(part.held_out), len(records)
        for document in source.documents():
            assert document.record is not None
            (others if chooser.takes(document) else records).append(document.record)
        sizes.append(len(records) - before)
        if not sizes[-1]:
            raise BadInput("no prompts", where=f"data.source={part.source_name}", hint="the file is empty")
        of = f" of {number}" if isinstance(settings.source, list) else ""
        fingerprint |= {f"{name}{of}": value for name, value in (source.fingerprint() | {"held_out": part.held_out}).items()}
    seed = seed if settings.seed is None else settings.seed
    fingerprint |= {"tokenizer": tokenizer.fingerprint}
    encoding = Encoding.of_settings(tokenizer, settings)
    fingerprint |= {"template": encoding.template_hash, "bos": settings.bos, "special": settings.special}
    check_blocks(settings, "alone", "prompts")
    fingerprint |= {"seed": seed, "shuffle": settings.shuffle}
    order, held_out_order = Order(len(records), seed if settings.shuffle else None), Order(len(others), None, repeats=False)
    places = len(records)
    if isinstance(settings.source, list):
        # The rollout decides how many prompts a step takes, so the prompts of a step are not known here.
        if any(isinstance(mixed.weight, dict) for mixed in settings.source):
            problem = "weights by step are for rows of data, not for prompts"
            raise BadInput(problem, where="data.source", hint="give each file one weight")
        order = mixed_order(settings.source, sizes, [1.0] * len(sizes), 1, settings, seed)
        places = order.order.places_per_epoch or places
        fingerprint |= {f"share of {number}": str((mixed.weight, mixed.epochs)) for number, mixed in enumerate(settings.source)}
        fingerprint |= {"temperature": settings.mixture_temperature}
    most = None if settings.epochs is None else int(settings.epochs * places)
    held_out = Prompts(others, encoding, held_out_order, fingerprint, settings.source_name) if others else None
    return Prompts(records, encoding, order, fingerprint, settings.source_name, most), held_out


# Names of settings that apply only to rows of given answers.
OF_ROWS = ("packing", "too_long", "online", "learn")


def check_prompt_settings(settings: DataSettings) -> None:
    """Checks that no setting is set that would be ignored.

    Raises:
        BadInput: such a setting is not at its default.
    """
    if settings.format not in ("auto", PROMPT):
        problem = f"data.format={settings.format}, and reinforcement learning reads prompts"
        raise BadInput(problem, hint="leave it out; data.columns.prompt=NAME reads the prompt from another column")
    fields = type(settings).model_fields
    for name in OF_ROWS:
        if name in fields and getattr(settings, name) != fields[name].default:
            problem = f"data.{name} is for answers that are in the data, and here they are generated"
            raise BadInput(problem, hint=f"leave `data.{name}` out")
