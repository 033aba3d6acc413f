"""Decodes the tokens of a completion to text as they arrive, in whole characters, and finds stop strings."""

from collections.abc import Sequence
from typing import Any

from argosy.core.errors import BadInput


class Detokenizer:
    """Decodes one completion while its tokens arrive.

    Each call returns text that no later token can change. Held back are a character whose bytes are not complete yet, and an ending
    that may be the beginning of a stop string.

    stopped: the stop string that was found; None so far. Text after it is dropped.

    Args:
        tokenizer: the tokenizer; None: no text is returned.
        prompt: the token ids before the completion. The completion continues their text, so it keeps its leading space.
        stop: strings that end the completion. If one token completes several, the one that begins first counts.
        include_stop: whether to keep the stop string in the text.
        begun: whether the first token keeps its leading space even if the prompt has no text, such as `bos` alone.

    Raises:
        BadInput: a stop string is empty, or stop strings are given without a tokenizer.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        begun: bool = False,
    ):
        if any(not s for s in stop):
            raise BadInput("an empty stop string would stop everything")
        if stop and tokenizer is None:
            raise BadInput("stop strings need a tokenizer", hint="use stop_tokens")
        self.stop, self.include_stop = tuple(stop), include_stop
        self.stopped: str | None = None
        self._held = ""
        self._stream = None if tokenizer is None else tokenizer.stream()
        if self._stream is not None:
            for token in prompt:
                self._stream.push(token)
            if begun:
                self._stream.begun()

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """Adds a token. Returns the text that has become final.

        Args:
            may_stop: whether a stop string that is complete now ends the completion.
        """
        if self._stream is None or self.stopped is not None:
            return ""
        self._held += self._stream.push(token)
        if not may_stop:
            return self._rest()
        if self._cut_at_stop():
            return self._rest()
        keep = max((n for s in self.stop for n in range(1, len(s)) if self._held.endswith(s[:n])), default=0)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text

    def end(self) -> str:
        """Ends the completion. Returns the text that was held back."""
        if self._stream is not None and self.stopped is None:
            self._held += self._stream.end()
            self._cut_at_stop()
        return self._rest()

    def _cut_at_stop(self) -> bool:
        """Cuts the held text at the first stop string in it."""
        places = [(at, s) for s in self.stop if (at := self._held.find(s)) >= 0]
        if not places:
            return False
        at, self.stopped = min(places)
        self._held = self._held[: at + len(self.stopped) * self.include_stop]
        return True

    def _rest(self) -> str:
        text, self._held = self._held, ""
        return text


def token_spellings(tokenizer: Any, word: str) -> list[tuple[int, ...]]:
    """The token ids of a word, at the beginning of a text and after a space.

    Raises:
        BadInput: there is no tokenizer, or the word consists of spaces.
    """
    if tokenizer is None:
        raise BadInput("bad_words as text need a tokenizer", hint="give token ids")
    if not word.strip():
        raise BadInput(f"{word!r} among bad_words would ban nearly everything")
    plain = word.lstrip()
    return list(dict.fromkeys(tuple(tokenizer.encode(text)) for text in (plain, f" {plain}")))
