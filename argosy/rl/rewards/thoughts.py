"""Finds the text after the thoughts of a reasoning model. Rewards grade only that text, because a thought may try every answer.

The marks around thoughts are those of DeepSeek R1, Qwen 3 and SmolLM 3, of Mistral's Magistral, of Kimi VL and of Seed OSS. gpt-oss
writes thoughts as messages of a channel (`infer.tools.channels`), whose marks are special tokens and decode to nothing. These marks
become `<think>` when a completion is converted to text. If a chat template opens the thought at the end of the prompt, the completion
has the closing mark only.
"""

from collections.abc import Sequence
from typing import Any

MARKS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<seed:think>", "</seed:think>"),
)
# Prompt tokens in which an opening mark and the blanks behind it fit, even as single bytes.
TAIL = 24


def without_thoughts(text: str, thinking: bool = False) -> str | None:
    """Returns the text of a completion after its last thought; None if a thought is not closed.

    Args:
        thinking: whether the prompt has opened a thought.
    """
    after = max((text.rfind(close) + len(close) for _, close in MARKS if close in text), default=None)
    if after is None and thinking:
        return None
    rest = text[after or 0 :]
    return None if any(opening in rest for opening, _ in MARKS) else rest


def text_with_thoughts(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Decodes a completion, with thoughts of channels between `<think>` and `</think>`. A thought that no message follows is not
    closed.
    """
    from argosy.infer.tools.channels import ChannelParser, channel_marks

    marks = channel_marks(tokenizer)
    if not marks.keys() & set(tokens):
        return tokenizer.decode(tokens)
    stream, parser = tokenizer.stream(marks=marks), ChannelParser()
    text = "".join(stream.push(token) for token in tokens) + stream.end()
    pieces = parser.push(text), parser.end()
    thought, answer = ("".join(parts) for parts in zip(*pieces))
    opening, closing = MARKS[0]
    if not thought:
        return answer
    return f"{opening}{thought}{closing}{answer}" if parser.over else f"{opening}{thought}"


def opens_thought(tokenizer: object, prompt: Sequence[int]) -> bool:
    """Whether the tokens of a prompt end with an opening mark."""
    decode = getattr(tokenizer, "decode", None)
    tail = decode(list(prompt[-TAIL:])).rstrip() if decode is not None else ""
    return tail.endswith(tuple(opening for opening, _ in MARKS))
