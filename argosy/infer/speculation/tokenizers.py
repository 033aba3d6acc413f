"""A draft model must have the tokenizer of the model that it drafts for."""

from typing import Any

from argosy.core.errors import BadInput

# Text by which two tokenizers are told apart.
SAMPLE = "Speculation: 1 of 2 models drafts, né?"


def check_tokenizers(*tokenizers: Any) -> None:
    """Checks that tokenizers are the same. None, of a model that came without one, counts as any.

    Raises:
        BadInput: they differ.
    """
    if len({tuple(tokenizer.encode(SAMPLE)) for tokenizer in tokenizers if tokenizer is not None}) > 1:
        raise BadInput("the draft model has another tokenizer", hint="two models of one tokenizer")
