"""The rules that split text into words before a byte-level vocabulary is applied, by the names that GGUF files give them.

A GGUF file has only the name of its rule. A wrong rule would give wrong ids without an error: with GPT-2's rule instead of `smollm`,
"\\n\\n1. First" has one token more. So an unknown name is refused. The names are those of llama.cpp (ggml-org/llama.cpp at 00ad355,
src/llama-vocab.cpp). The regular expressions are those of the tokenizer.json that each family published, because llama.cpp has
rewritten some for its own engine.
"""

from dataclasses import dataclass
from typing import Any

from argosy.core.errors import BadInput, nearest

_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CAPITAL, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_NOT_HAN_CAPITAL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_NOT_HAN_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
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
KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN_CAPITAL}*{_NOT_HAN_SMALL}+{_ENDINGS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN_CAPITAL}+{_NOT_HAN_SMALL}*{_ENDINGS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)  # moonshotai/Kimi-K2-Instruct, tokenization_kimi.py
BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
YOUTU = r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+"
JAIS2_SPACES = (
    "".join(rf"|\s{{{run}}}(?!\S)" for run in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2")) + r"|\s"
)
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
KANA, CJK = "[一-龥぀-ゟ゠-ヿ]+", "[一-龥ࠀ-一가-퟿]+"
# The letters that have upper and lower case, for deepseek-llm.
CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbe"
    "ῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    "𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
MARKS = "!-/:-~！-／：-～‘-‟\u3000-。"


@dataclass(frozen=True)
class SplitRule:
    """A rule that splits text into words.

    cuts: the regular expressions that are applied one after the other.
    nfc: whether text is normalized to NFC first.
    whole: whether a word that is a token is taken whole, without merges.
    bos: whether a text begins with the beginning-of-sequence token, if the file does not tell.
    """

    cuts: tuple[str, ...]
    nfc: bool = False
    whole: bool = False
    bos: bool = False


DEFAULT = SplitRule((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
_GPT2, _DIGITS, _QWEN2 = SplitRule((GPT2,)), SplitRule((DIGIT, GPT2)), SplitRule((QWEN2,), nfc=True)
_LLAMA3 = SplitRule((LLAMA3,), whole=True, bos=True)


def for_names(names: str, rule: SplitRule) -> dict[str, SplitRule]:
    return dict.fromkeys(names.split(), rule)


RULES = {
    "default": DEFAULT,
    **for_names("gpt-2 phi-2 mpt olmo jais exaone4 trillion granite-docling gigachat a.x-4.0 mellum modern-bert", _GPT2),
    **for_names("roberta-bpe jina-v1-en jina-v2-code jina-v2-de jina-v2-es jina-de jina-es", _GPT2),
    **for_names("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", _DIGITS),
    **for_names("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano", _LLAMA3),
    **for_names("dbrx smaug-bpe chatglm-bpe glm4", SplitRule((LLAMA3,))),
    **for_names("qwen2 deepseek-r1-qwen megrez kormo f2llmv2", _QWEN2),
    **for_names("stablelm2 hunyuan solar-open grok-2", SplitRule((QWEN2,))),
    **for_names("qwen35", SplitRule((QWEN35,), nfc=True)),
    **for_names("tekken", SplitRule((TEKKEN,), whole=True, bos=True)),
    **for_names("gpt-4o llama4 kanana2 talkie minimax-m2", SplitRule((GPT4O,))),
    **for_names("granite-embed-multi-97m", SplitRule((GPT4O,), whole=True)),
    **for_names("tiny_aya cohere2moe", SplitRule((r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O))),
    **for_names("youtu", SplitRule((YOUTU, GPT4O.replace(r"\p{N}{1,3}", DIGIT)), whole=True)),
    **for_names("kimi-k2", SplitRule((KIMI,), whole=True)),
    **for_names("deepseek-llm", SplitRule((r"[\r\n]", rf"\s?[{CASED}]+", rf"\s?[{MARKS}]+", r"\s+$", CJK, r"\p{N}+"))),
    **for_names("deepseek-coder", SplitRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, DIGIT))),
    **for_names("deepseek-v3 hunyuan-dense joyai-llm hy_v4", SplitRule((r"\p{N}{1,3}", KANA, DEEPSEEK3))),
    **for_names("spark2_5", SplitRule((DIGIT, KANA, DEEPSEEK3.replace(r"[\r\n]*|\s*[\r\n]+", r"|[\r\n]")))),
    **for_names("falcon", SplitRule((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"))),
    **for_names("jais-2", SplitRule((LLAMA3.replace(r"|\s+(?!\S)|\s+", JAIS2_SPACES),))),
    **for_names("bailingmoe bailingmoe2 llada-moe", SplitRule((BAILING,))),
    **for_names("seed-coder", SplitRule((QWEN2.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+"),))),
    **for_names("ufakzeka", SplitRule((QWEN2.removeprefix(f"{_ENDINGS}|"),))),
    **for_names("laguna", SplitRule((r"[^\n]+|[\n]+", QWEN2))),
    **for_names("minicpm5", SplitRule((r"\p{N}{1,3}", QWEN2.replace(r"\p{N}|", r"\p{N}+|")), whole=True)),
    **for_names("bloom poro-chat gpt3-finnish", SplitRule((BLOOM,))),
    **for_names("viking", SplitRule((BLOOM, DIGIT))),
}
"""The rules of llama.cpp's table that are expressions. Left out, and so refused: rules written in C++ (afmoe, superbpe), and
vocabularies that are not of bytes (gemma4, sarvam-moe, whitespace)."""


def rule(name: str, where: str) -> SplitRule:
    """The rule with this name. `where` is the place of the name, for errors.

    Raises:
        BadInput: there is no rule with this name.
    """
    if name not in RULES:
        hint = nearest(name, RULES) or ""
        raise BadInput(f"the pre-tokenizer rule `{name[:60]}` is not known", where=where, hint=hint)
    return RULES[name]


def pre_tokenizer(rule: SplitRule) -> dict[str, Any]:
    """A rule as the `pre_tokenizer` of a tokenizer.json."""
    cuts = [{"type": "Split", "pattern": {"Regex": cut}, "behavior": "Isolated", "invert": False} for cut in rule.cuts]
    return {"type": "Sequence", "pretokenizers": [*cuts, BYTE_LEVEL]}


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
