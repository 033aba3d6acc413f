"""Describes how documents become tokens: the tokenizer and the settings of tokenization."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from argosy.core.errors import BadInput, close_name
from argosy.data.chat.published import PUBLISHED
from argosy.data.settings import DataSettings
from argosy.data.sources.records import LABELED
from argosy.data.tokenizers.config import CONFIG_BYTES, DEFAULT, read_text

if TYPE_CHECKING:
    from argosy.data.tokenizers.load import Tokenizer

# The template name that selects Stanford's Alpaca text, even if the tokenizer has a chat template.
ALPACA = "alpaca"
TEMPLATE_HINT = f"data.template=NAME sets a published one ({', '.join(PUBLISHED)}), data.template=FILE.jinja one of your own"


@dataclass(frozen=True)
class Encoding:
    """A tokenizer, and the settings of tokenization.

    tokenizer: the tokenizer.
    bos: whether a document begins with the beginning-of-sequence token; None: whether the tokenizer adds this token to prompts.
    special: whether names of special tokens in a text become those tokens.
    learn: which tokens of records count in the loss, `answers` or `all`.
    template: the chat template: the name of a template of the tokenizer, the name of a published template, a Jinja file, or `alpaca`;
        None: the template of the tokenizer.
    labels: the names of the classes of labeled texts, in the order of the scores; empty: labels are numbers.
    negatives: number of negative texts in a record of the format `negatives` (anchor, positive, negatives).
    prompts: the text that is put before the texts of a column, by the name of the column.
    """

    tokenizer: "Tokenizer"
    bos: bool | None = None
    special: bool = False
    learn: str = "answers"
    template: str | None = None
    labels: tuple[str, ...] = ()
    negatives: int = 1
    prompts: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_settings(cls, tokenizer: "Tokenizer", settings: DataSettings) -> "Encoding":
        more = {"labels": tuple(settings.labels), "negatives": settings.negatives, "prompts": settings.prompts}
        return cls(tokenizer, settings.bos, settings.special, settings.learn, settings.template, **more)

    @property
    def puts_bos(self) -> bool:
        """Whether documents begin with the beginning-of-sequence token: the setting, or the tokenizer's behavior for prompts."""
        return bool(self.tokenizer.adds_bos if self.bos is None else self.bos)

    @cached_property
    def chat_templates(self) -> tuple[Mapping[str, str], str | None]:
        """The chat templates by name, and the name of the chosen one (None: the default). There are no templates for `alpaca`.

        Raises:
            BadInput: `template` names no template of the tokenizer, no published template and no file.
        """
        tokenizer, template = self.tokenizer, self.template
        if template is None:
            return tokenizer.chat_templates, None
        if template in tokenizer.chat_templates:
            return tokenizer.chat_templates, template
        if template == ALPACA:
            return {}, ALPACA
        return {DEFAULT: template_text(template, tokenizer.chat_templates)}, None

    @property
    def template_hash(self) -> str:
        """The sha256 of the templates that may be used, and of the special tokens that they can write."""
        templates, name = self.chat_templates
        used = {name: templates[name]} if name is not None and name in templates else dict(templates)
        return hashlib.sha256(json.dumps([used, self.tokenizer.special, name], sort_keys=True).encode()).hexdigest()

    def rendering(self, format: str) -> str:
        """A phrase that says how records of a format become text."""
        templates, _ = self.chat_templates
        if format in LABELED:
            return "their text"
        if format == "alpaca" and not templates:
            return "Stanford's Alpaca text"
        if not templates or format == "stepwise":
            return "their text"
        if format in ("completion", "preference", "kto"):
            return "their text, or a chat template for messages"
        return f"the chat template {self.template}" if self.template else "the tokenizer's chat template"


def template_text(name: str, templates: Mapping[str, str]) -> str:
    """The source text of a chat template: one of the tokenizer's `templates`, a published template, or the content of a Jinja file.

    Raises:
        BadInput: there is no such template.
    """
    if template := templates.get(name) or PUBLISHED.get(name):
        return template
    path = Path(name).expanduser()
    if not path.is_file():
        where = f"this tokenizer's are {', '.join(templates) or 'none'}, and there is no such file"
        hint = close_name(name, {*templates, *PUBLISHED, ALPACA} - {name}) or TEMPLATE_HINT
        raise BadInput(f"no chat template `{name}`", where=where, hint=hint)
    return read_text(path, CONFIG_BYTES)
