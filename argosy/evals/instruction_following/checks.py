"""The checks of IFEval, one for each kind of instruction.

Checks agree with the authors' program, including its quirks, because published results come from it. They differ if that program would
need a download: sentences are divided by rules, and not by NLTK's Punkt model; words in capitals by rules close to NLTK's; and the
language of a response is found by scripts and frequent words (`language`), and not by langdetect. In `letter_frequency`, a character
that is no letter is counted, while that program replaces it by a random letter.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from argosy.core.errors import BadInput, UnknownName
from argosy.evals.instruction_following.language import KNOWN, language_of
from argosy.evals.instruction_following.sentences import sentences_of, words_apart
from argosy.evals.rows import Fields

Relation = Literal["less than", "at least"]
RELATIONS = ("less than", "at least")
ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


class InstructionCheck(NamedTuple):
    """The check of one kind of instruction.

    is_followed: (response, **arguments) -> whether the response follows the instruction.
    takes: the names of its arguments, each with a description, a key of `_ACCEPTS`.
    """

    is_followed: Callable[..., bool]
    takes: Mapping[str, str]


def follows(kind: str, response: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a response follows an instruction.

    Args:
        kind: the kind of instruction, a key of CHECKS.
        arguments: the arguments of its check. Arguments that are None are ignored, and 3.0 counts as 3, because the copy of the data
        on the Hub has arguments in this form.
    """
    some = {name: value for name, value in arguments.items() if value is not None}
    return CHECKS[kind].is_followed(response, **{k: int(v) if isinstance(v, float) else v for k, v in some.items()})


def check_instructions(path: Path, rows: Sequence[Fields]) -> None:
    """Checks that every instruction of these rows can be checked.

    Raises:
        UnknownName: the kind of an instruction is not known.
        BadInput: an argument is missing, unknown or of another type.
    """
    for number, row in enumerate(rows):
        where = f"{path}, row {number + 1} of {len(rows)}"
        kinds, kwargs = row["instruction_id_list"], row["kwargs"]
        if len(kinds) != len(kwargs):
            raise BadInput(f"{len(kinds)} instructions and arguments for {len(kwargs)}", where=where)
        for kind, arguments in zip(kinds, kwargs):
            if kind not in CHECKS:
                raise UnknownName("instruction", kind, CHECKS, where=where)
            _check_arguments(kind, {k: v for k, v in arguments.items() if v is not None}, where)


def _check_arguments(kind: str, arguments: Mapping[str, Any], where: str) -> None:
    takes = CHECKS[kind].takes
    if missing := [name for name in takes if name not in arguments]:
        raise BadInput(f"{kind} needs `{missing[0]}`", where=where)
    if unknown := [name for name in arguments if name not in takes]:
        raise BadInput(f"{kind} has no argument `{unknown[0]}`", where=where)
    for name, value in arguments.items():
        if not _ACCEPTS[takes[name]](value):
            raise BadInput(f"`{name}` of {kind} should be {takes[name]}, not {value!r}", where=where)
    for name, expression in _expressions(arguments):
        try:
            re.compile(expression)
        except (re.error, OverflowError, RecursionError) as error:
            hint = "as in the authors' program, it is one; a backslash makes a character mean itself"
            raise BadInput(f"`{name}` of {kind} is no regular expression: {error}", where=where, hint=hint) from None


def _expressions(arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the arguments that are regular expressions, as in the authors' program: (name, the expression that is searched for)."""
    for name, value in arguments.items():
        if name in EXPRESSIONS:
            texts = value if isinstance(value, list) else [value]
            yield from ((name, EXPRESSIONS[name](text)) for text in texts)


def _whole(value: Any) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer())


_ACCEPTS: dict[str, Callable[[Any], bool]] = {
    "a whole number": _whole,
    "text": lambda value: isinstance(value, str) and bool(value.strip()),
    "a list of texts": lambda value: isinstance(value, list) and all(isinstance(v, str) for v in value) and bool(value),
    "`less than` or `at least`": lambda value: value in RELATIONS,
    f"a language: {', '.join(sorted(KNOWN))}": lambda value: value in KNOWN,
    "one character": lambda value: isinstance(value, str) and len(value) == 1,
}
_N, _TEXT, _TEXTS, _RELATION, _LANGUAGE, _LETTER = _ACCEPTS


def _satisfies(count: int, relation: str, threshold: int) -> bool:
    return count < threshold if relation == "less than" else count >= threshold


# ---- keywords

# The regular expression that a check searches for, by the name of the argument.
EXPRESSIONS: dict[str, Callable[[str], str]] = {
    "keywords": lambda word: word,
    "keyword": lambda word: word.strip(),
    "forbidden_words": lambda word: rf"\b{word}\b",
    "postscript_marker": lambda marker: MARKERS.get(marker.strip(), rf"\s*{marker.strip().lower()}.*$"),
    "section_spliter": lambda word: rf"\s?{word.strip()}\s?\d+\s?",
}
MARKERS = {"P.P.S": r"\s*p\.\s?p\.\s?s.*$", "P.S.": r"\s*p\.\s?s\..*$"}


def existence(response: str, keywords: list[str]) -> bool:
    """Whether all keywords occur. They are regular expressions, as in the authors' program, and may match parts of words."""
    return all(re.search(EXPRESSIONS["keywords"](word), response, re.IGNORECASE) for word in keywords)


def forbidden(response: str, forbidden_words: list[str]) -> bool:
    """Whether none of the words occurs as a whole word."""
    return not any(re.search(EXPRESSIONS["forbidden_words"](word), response, re.IGNORECASE) for word in forbidden_words)


def frequency(response: str, keyword: str, frequency: int, relation: str) -> bool:
    return _satisfies(len(re.findall(EXPRESSIONS["keyword"](keyword), response, re.IGNORECASE)), relation, frequency)


def letter_frequency(response: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _satisfies(response.lower().count(letter.lower()), let_relation, let_frequency)


# ---- language and case


def in_language(response: str, language: str) -> bool:
    """Whether the response is in this language. A response without letters is in any language, as in the authors' program."""
    guess = language_of(response)
    return guess is None or guess == language


def english_capital(response: str) -> bool:
    return response.isupper() and in_language(response, "en")


def english_lowercase(response: str) -> bool:
    return response.islower() and in_language(response, "en")


def capital_words(response: str, capital_frequency: int, capital_relation: str) -> bool:
    return _satisfies(sum(word.isupper() for word in words_apart(response)), capital_relation, capital_frequency)


# ---- length


def sentences(response: str, num_sentences: int, relation: str) -> bool:
    return _satisfies(len(sentences_of(response)), relation, num_sentences)


def word_count(response: str, num_words: int, relation: str) -> bool:
    return _satisfies(len(re.findall(r"\w+", response)), relation, num_words)


def paragraph_count(response: str, num_paragraphs: int) -> bool:
    """Whether `***` divides the response into this number of parts. Only the first and the last part may be empty, and are not counted
    then."""
    parts = re.split(r"\s?\*\*\*\s?", response)
    if any(not part.strip() for part in parts[1:-1]):
        return False
    return sum(bool(part.strip()) for part in parts) == num_paragraphs


def first_word(response: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Whether blank lines divide the response into this number of parts, and the nth part begins with the word. For the index n, empty
    parts count too, as in the authors' program."""
    parts = response.split("\n\n")
    count = sum(bool(part.strip()) for part in parts)
    if count != num_paragraphs or nth_paragraph > count or not parts[nth_paragraph - 1].strip():
        return False
    word = parts[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", word, maxsplit=1)[0].lower() == first_word.lower()


# ---- form


def placeholders(response: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[.*?\]", response)) >= num_placeholders


def postscript(response: str, postscript_marker: str) -> bool:
    return bool(re.search(EXPRESSIONS["postscript_marker"](postscript_marker), response.lower(), re.MULTILINE))


def bullets(response: str, num_bullets: int) -> bool:
    """Whether exactly this number of lines begin with `*` or `-`."""
    stars = re.findall(r"^\s*\*[^\*].*$", response, re.MULTILINE)
    return len(stars) + len(re.findall(r"^\s*-.*$", response, re.MULTILINE)) == num_bullets


def constrained_response(response: str) -> bool:
    return any(answer in response for answer in ANSWERS)


def highlights(response: str, num_highlights: int) -> bool:
    """Whether there are at least this number of `*sections*`. `**bold**` counts twice, as in the authors' program."""
    single = [part for part in re.findall(r"\*[^\n\*]*\*", response) if part.strip("*").strip()]
    double = [part for part in re.findall(r"\*\*[^\n\*]*\*\*", response) if part[2:-2].strip()]
    return len(single) + len(double) >= num_highlights


def sections(response: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.split(EXPRESSIONS["section_spliter"](section_spliter), response)) - 1 >= num_sections


def is_json(response: str) -> bool:
    """Whether the response is JSON, alone or in a markdown fence."""
    text = response.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def title(response: str) -> bool:
    """Whether the response has a title, `<<a title>>`, on one line."""
    return any(match.lstrip("<").rstrip(">").strip() for match in re.findall(r"<<[^\n]+>>", response))


def two_responses(response: str) -> bool:
    """Whether `******` divides the response into two different parts. Further parts must be empty, and at the beginning or the end."""
    parts = [part.strip() for part in response.split("******")]
    full = [part for part in parts if part]
    return all(parts[1:-1]) and len(full) == 2 and full[0] != full[1]


def repeats(response: str, prompt_to_repeat: str) -> bool:
    return response.strip().lower().startswith(prompt_to_repeat.strip().lower())


def ends_with(response: str, end_phrase: str) -> bool:
    return response.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def is_quoted(response: str) -> bool:
    text = response.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def no_comma(response: str) -> bool:
    return "," not in response


CHECKS: dict[str, InstructionCheck] = {
    "change_case:capital_word_frequency": InstructionCheck(capital_words, {"capital_frequency": _N, "capital_relation": _RELATION}),
    "change_case:english_capital": InstructionCheck(english_capital, {}),
    "change_case:english_lowercase": InstructionCheck(english_lowercase, {}),
    "combination:repeat_prompt": InstructionCheck(repeats, {"prompt_to_repeat": _TEXT}),
    "combination:two_responses": InstructionCheck(two_responses, {}),
    "detectable_content:number_placeholders": InstructionCheck(placeholders, {"num_placeholders": _N}),
    "detectable_content:postscript": InstructionCheck(postscript, {"postscript_marker": _TEXT}),
    "detectable_format:constrained_response": InstructionCheck(constrained_response, {}),
    "detectable_format:json_format": InstructionCheck(is_json, {}),
    "detectable_format:multiple_sections": InstructionCheck(sections, {"section_spliter": _TEXT, "num_sections": _N}),
    "detectable_format:number_bullet_lists": InstructionCheck(bullets, {"num_bullets": _N}),
    "detectable_format:number_highlighted_sections": InstructionCheck(highlights, {"num_highlights": _N}),
    "detectable_format:title": InstructionCheck(title, {}),
    "keywords:existence": InstructionCheck(existence, {"keywords": _TEXTS}),
    "keywords:forbidden_words": InstructionCheck(forbidden, {"forbidden_words": _TEXTS}),
    "keywords:frequency": InstructionCheck(frequency, {"keyword": _TEXT, "frequency": _N, "relation": _RELATION}),
    "keywords:letter_frequency": InstructionCheck(
        letter_frequency, {"letter": _LETTER, "let_frequency": _N, "let_relation": _RELATION}
    ),
    "language:response_language": InstructionCheck(in_language, {"language": _LANGUAGE}),
    "length_constraints:nth_paragraph_first_word": InstructionCheck(
        first_word, {"num_paragraphs": _N, "nth_paragraph": _N, "first_word": _TEXT}
    ),
    "length_constraints:number_paragraphs": InstructionCheck(paragraph_count, {"num_paragraphs": _N}),
    "length_constraints:number_sentences": InstructionCheck(sentences, {"num_sentences": _N, "relation": _RELATION}),
    "length_constraints:number_words": InstructionCheck(word_count, {"num_words": _N, "relation": _RELATION}),
    "punctuation:no_comma": InstructionCheck(no_comma, {}),
    "startend:end_checker": InstructionCheck(ends_with, {"end_phrase": _TEXT}),
    "startend:quotation": InstructionCheck(is_quoted, {}),
}
