"""Checks that a draft model has the tokenizer of the model that it drafts for."""

from typing import Any

from argosy.core.errors import BadInput

# Text whose token ids are compared.
SAMPLE = "Speculation: 1 of 2 models drafts, né?"


def check_tokenizers(*tokenizers: Any) -> None:
    """Checks that tokenizers are the same. None stands for a model without a tokenizer, and is ignored.

    Raises:
        BadInput: they differ.
    """
    if len({tuple(tokenizer.encode(SAMPLE)) for tokenizer in tokenizers if tokenizer is not None}) > 1:
        raise BadInput("the draft model has another tokenizer", hint="two models of one tokenizer")
