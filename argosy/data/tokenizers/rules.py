"""How text is cut before a byte-level vocabulary is applied, by the names that GGUF files give the rules.

Notable: a GGUF names its rule and leaves it to the reader. The wrong rule gives other ids and no error: with GPT-2's in
place of `smollm`, "\\n\\n1. First" has one token more. So an unknown name is refused. Names are those of llama.cpp
(ggml-org/llama.cpp, src/llama-vocab.cpp), expressions those of the tokenizer.json that each family published.
"""

from dataclasses import dataclass
from typing import Any

from argosy.core.errors import BadInput, nearest

_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CAPITAL, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ASCII = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""

DIGIT = r"\p{N}"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
QWEN2 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
QWEN35 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITAL}*{_SMALL}+|[^\r\n\p{{L}}\p{{N}}]?{_CAPITAL}+{_SMALL}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITAL}*{_SMALL}+{_ENDINGS}?|[^\r\n\p{{L}}\p{{N}}]?{_CAPITAL}+{_SMALL}*{_ENDINGS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
DEEPSEEK3 = rf"{_ASCII}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"


@dataclass(frozen=True)
class Rule:
    """cuts: expressions applied one after the other. nfc: composed first. whole: a word that is a token is not built from
    merges. bos: a text begins with the beginning-of-sequence token where the file does not say."""

    cuts: tuple[str, ...]
    nfc: bool = False
    whole: bool = False
    bos: bool = False


DEFAULT = Rule((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
_GPT2, _DIGITS, _QWEN2 = Rule((GPT2,)), Rule((DIGIT, GPT2)), Rule((QWEN2,), nfc=True)
_LLAMA3 = Rule((LLAMA3,), whole=True, bos=True)
_GPT4O = Rule((GPT4O,))

RULES = {
    "default": DEFAULT,
    **dict.fromkeys(["gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "trillion"], _GPT2),
    **dict.fromkeys(["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"], _DIGITS),
    **dict.fromkeys(
        ["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"], _LLAMA3
    ),
    **dict.fromkeys(["dbrx", "smaug-bpe", "chatglm-bpe", "glm4"], Rule((LLAMA3,))),
    **dict.fromkeys(["qwen2", "deepseek-r1-qwen", "megrez"], _QWEN2),
    **dict.fromkeys(["stablelm2", "hunyuan"], Rule((QWEN2,))),
    "qwen35": Rule((QWEN35,), nfc=True),
    "tekken": Rule((TEKKEN,), whole=True, bos=True),
    **dict.fromkeys(["gpt-4o", "llama4"], _GPT4O),
    **dict.fromkeys(["deepseek-v3", "hunyuan-dense"], Rule((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3))),
    "falcon": Rule((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
}


def rule(name: str, where: str) -> Rule:
    """The rule of a name.

    Raises:
        BadInput: none is known; any other would give wrong ids without a word.
    """
    if name not in RULES:
        hint = nearest(name, RULES) or ""
        raise BadInput(f"the pre-tokenizer rule `{name[:60]}` is not known", where=where, hint=hint)
    return RULES[name]


def pre_tokenizer(rule: Rule) -> dict[str, Any]:
    """A rule as tokenizer.json spells it."""
    cuts = [{"type": "Split", "pattern": {"Regex": cut}, "behavior": "Isolated", "invert": False} for cut in rule.cuts]
    return {"type": "Sequence", "pretokenizers": [*cuts, BYTE_LEVEL]}


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
