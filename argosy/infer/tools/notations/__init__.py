"""How chat templates write calls of tools: one file a notation, and the template says which it teaches.

    Hermes, Qwen        <tool_call>{"name": "f", "arguments": {...}}</tool_call>, any number, after text
    Qwen 3.5            <tool_call><function=f><parameter=a>...</parameter></function></tool_call>, likewise
    Llama 3             {"name": "f", "parameters": {...}}, separated by semicolons, and nothing else
    gpt-oss             one message of the channel `commentary`, after thoughts
    Mistral             [TOOL_CALLS][{"name": "f", "arguments": {...}}] or [TOOL_CALLS]f[ARGS]{...}, after text
    Gemma 4             <|tool_call>call:f{a:<|"|>...<|"|>,b:1}<tool_call|>, any number, after text
    DeepSeek, Kimi K2   calls between special tokens, in a section after text

A new notation is a class in a file of its own, and an entry here.
"""

from collections.abc import Sequence
from typing import Any

from argosy.infer.tools.calls import CallNotation, Message
from argosy.infer.tools.notations.deepseek import DeepSeekNotation
from argosy.infer.tools.notations.gemma import GemmaNotation
from argosy.infer.tools.notations.gpt_oss import GptOssNotation
from argosy.infer.tools.notations.hermes import HermesNotation
from argosy.infer.tools.notations.kimi import KimiNotation
from argosy.infer.tools.notations.llama3 import Llama3Notation
from argosy.infer.tools.notations.mistral import MistralNotation
from argosy.infer.tools.notations.qwen_xml import QwenXmlNotation

# In this order: a template that teaches one may have words of the later ones.
NOTATIONS: Sequence[type[CallNotation]] = (
    GptOssNotation,
    KimiNotation,
    DeepSeekNotation,
    GemmaNotation,
    MistralNotation,
    QwenXmlNotation,
    HermesNotation,
    Llama3Notation,
)
KNOWN = f"{', '.join(notation.title for notation in NOTATIONS[:-1])} or {NOTATIONS[-1].title}"


def template_notation(template: str) -> type[CallNotation] | None:
    """The notation that a chat template teaches; None: another one, and calls stay text."""
    return next((notation for notation in NOTATIONS if notation.taught_by(template)), None)


def find_notation(template: str, tokenizer: Any, tools: Sequence[Message] = ()) -> CallNotation | None:
    """The notation of a chat template, as this tokenizer marks it; None: its calls cannot be read.

    Args:
        tools: those that are offered.
    """
    kind = template_notation(template)
    notation = None if kind is None else kind(template, tokenizer, tools)
    return None if notation is None or (notation.needs_marks and len(notation.ids) < len(notation.names)) else notation
