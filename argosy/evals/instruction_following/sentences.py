"""Divides English text into sentences and words by rules, for checks that count them."""

import re

_TITLES = {
    "mr", "mrs", "ms", "dr", "prof", "st", "sr", "jr", "rev", "gen", "col", "lt", "sgt", "capt", "gov", "sen", "rep",
    "hon", "messrs",
}
_ABBREVIATIONS = {
    "vs", "etc", "e.g", "i.e", "a.m", "p.m", "u.s", "u.k", "inc", "ltd", "co", "corp", "no", "vol", "fig", "approx",
    "ph.d", "dept",
}
# A possible end of a sentence: the last word, the mark, the closing quotes and brackets, and the next word.
_END = re.compile(r"""(?P<word>\S*?)(?P<mark>\.\.\.+|…|[.!?]+)(?P<close>["'”’)\]*]*)(?=\s+(?P<next>\S+)|\s*$)""")


def sentences_of(text: str) -> list[str]:
    """Divides a text into sentences. A sentence ends with `.`, `!` or `?` before a blank, and not with a line break alone. A period
    after an abbreviation or an initial does not end a sentence. Three dots end one only before a capital."""
    sentences, at = [], 0
    for match in _END.finditer(text):
        mark, after = match["mark"], (match["next"] or "").lstrip("\"'“‘([*")
        word = match["word"].lstrip("\"'“‘([*").lower()
        if mark == ".":
            initial = len(word) == 1 and word.isalpha() and word != "i"
            ends = not (word in _TITLES or initial) and (word not in _ABBREVIATIONS or after[:1].isupper())
            # A number like `1.` before an item of a list does not end a sentence.
            ends = ends and not (word.isdigit() and text[at : match.start("mark")].strip() == match["word"])
        else:
            ends = not mark.startswith(("..", "…")) or after[:1].isupper()
        if ends or not after:
            sentences.append(text[at : match.end()].strip())
            at = match.end()
    return [sentence for sentence in (*sentences, text[at:].strip()) if sentence]


_WORD = re.compile(r"[^\s,;:!?()\[\]{}<>\"“”`]+")
_CONTRACTION = re.compile(r"(?i)(.+?)(n't|'(?:s|m|d|re|ve|ll))$")


def words_apart(text: str) -> list[str]:
    """Divides a text into words. Contractions become two words (`DON'T` becomes `DO` and `N'T`), as in NLTK."""
    words: list[str] = []
    for word in _WORD.findall(text.replace("’", "'")):
        parts = [part for part in re.split(r"(?:--+|\.\.\.+)", word) if part]
        for part in parts:
            match = _CONTRACTION.fullmatch(part.rstrip("."))
            words += match.groups() if match else [part]
    return words
