"""The notations in which chat templates write tool calls, one file for each. The text of a template determines its notation.

    Hermes, Qwen        <tool_call>{"name": "f", "arguments": {...}}</tool_call>, any number, after text
    Qwen 3.5            <tool_call><function=f><parameter=a>...</parameter></function></tool_call>, any number, after text
    Llama 3             {"name": "f", "parameters": {...}}, separated by semicolons, without other text
    gpt-oss             one message of the channel `commentary`, after reasoning
    Mistral             [TOOL_CALLS][{"name": "f", "arguments": {...}}] or [TOOL_CALLS]f[ARGS]{...}, after text
    Gemma 4             <|tool_call>call:f{a:<|"|>...<|"|>,b:1}<tool_call|>, any number, after text
    DeepSeek, Kimi K2   calls between special tokens, in a section after text

A new notation is a class in a new file, and an entry in `NOTATIONS`.
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

# The order matters, because a template of one notation may contain words of later ones.
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
    """The notation of a chat template; None: it is unknown, and calls remain text."""
    return next((notation for notation in NOTATIONS if notation.taught_by(template)), None)


def find_notation(template: str, tokenizer: Any, tools: Sequence[Message] = ()) -> CallNotation | None:
    """Makes the notation of a chat template for a tokenizer; None: the notation is unknown, or the tokenizer lacks its special tokens.

    Args:
        tools: the offered tools.
    """
    kind = template_notation(template)
    notation = None if kind is None else kind(template, tokenizer, tools)
    return None if notation is None or (notation.needs_marks and len(notation.ids) < len(notation.names)) else notation
