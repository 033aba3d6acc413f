"""Converts conversations to token ids."""

from collections.abc import Mapping, Sequence
from typing import Any

from argosy.core.errors import BadInput


def chat_ids(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    template: str | None,
    variables: Mapping[str, Any],
    generation: Mapping[str, bool],
    special_tokens: bool,
) -> list[int]:
    """Returns the token ids of a conversation. Errors, and arguments not listed here, are those of `LM.chat_prompt`.

    Args:
        tokenizer: the tokenizer, whose chat template is used if `template` is None.
        generation: the arguments `add_generation_prompt` and `continue_final_message` of `LM.chat_prompt`, by name.
        special_tokens: the argument `add_special_tokens` of `LM.chat_prompt`.
    """
    templates = getattr(tokenizer, "chat_templates", None) or {}
    if not templates and (template is None or tokenizer is None):
        raise BadInput("this model has no chat template", hint="generate without --chat, or give messages as one text")
    from argosy.data.chat.omissions import check_complete, with_known_roles
    from argosy.data.chat.template import choose_template, render

    chat_template = template if template is not None else choose_template(templates, tools=bool(tools))
    messages, special = with_known_roles(messages, chat_template), tokenizer.special
    text = render(chat_template, messages, special, tools=tools, **generation, **variables)

    def again(**overrides: Any) -> str:
        generates = generation["add_generation_prompt"]
        return render(chat_template, special=special, add_generation_prompt=generates, **{**variables, **overrides})

    check_complete(again, text, chat_template, messages, tools, variables.get("documents"))
    ids = tokenizer.encode(text, special=True)
    return [tokenizer.bos, *ids] if special_tokens and tokenizer.adds_bos else ids
