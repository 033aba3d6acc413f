"""Requests log-probabilities of given tokens from a teacher on an OpenAI-compatible server, over HTTP.

The request is `POST /v1/completions` with token ids as the prompt and vLLM's `prompt_logprobs`, which returns the ids of the most
likely tokens at every position of a text. `argosy serve` and vLLM support this. OpenAI's own API and other servers that only have
`logprobs` do
not: `logprobs` are for generated tokens, and name tokens by their text, which several tokens may share.

The key is read only from the environment variables ARGOSY_TEACHER_KEY or OPENAI_API_KEY. It appears in no message and no file.
"""

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, Request, build_opener

import numpy as np

from argosy.core.errors import ArgosyError, BadInput
from argosy.data.distillation.likeliest import TopTokens
from argosy.data.tokenizers.load import Tokenizer
from argosy.run.distillation.address import KEYS

# Seconds that a request may take, and those that are waited before it is made again.
TIMEOUT_S, WAITS_S = 300.0, (1.0, 2.0, 4.0, 8.0, 16.0)
# The most seconds that a server's Retry-After is waited.
LONGEST_WAIT_S = 60.0
# HTTP statuses after which a request is made again: it is too many, or the server is not well.
AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)
# Characters of a server's own words that are shown.
SHOWN = 300
# The least probability of all tokens together that a server does not name: its numbers have 7 digits.
LEAST_REST = 1e-7
UNKNOWN = "\ufffd"


class Unmoved(HTTPRedirectHandler):
    """Refuses redirects, because the key must not be sent to another server."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


@dataclass
class Endpoint:
    """A model on a server.

    url: the address up to `/v1`.
    model: the name of the model on the server.
    tokenizer: the run's tokenizer.
    sleep: waits for a number of seconds.
    """

    url: str
    model: str
    tokenizer: Tokenizer
    sleep: Callable[[float], None] = time.sleep

    def top(self, ids: Sequence[int], k: int, vocab: int) -> TopTokens:
        """Requests the k most likely tokens at every position of a text from the second on, and the total log-probability of all other
        tokens.

        Args:
            ids: the token ids of the text.
            vocab: the size of the student's vocabulary.

        Raises:
            BadInput: the server lacks the model, the tokens or the field, or refuses the request.
            ArgosyError: the server does not reply, or its numbers are invalid.
        """
        body = {"model": self.model, "prompt": list(ids), "max_tokens": 1, "temperature": 0, "prompt_logprobs": k}
        reply = self.request("completions", body)
        try:
            (choice,) = reply["choices"]
            places = choice["prompt_logprobs"]
        except (KeyError, TypeError, ValueError):
            places = None
        if not isinstance(places, list):
            problem = f"{self.url} answers without `prompt_logprobs`, log-probabilities of given tokens"
            hint = "vLLM and `argosy serve` have them; OpenAI's own API has those of generated tokens only"
            raise BadInput(problem, where=f"objective.teacher_model={self.model}", hint=hint)
        if len(places) != len(ids):
            problem = f"{self.url} gives {len(places)} log-probabilities for a prompt of {len(ids)} tokens"
            raise BadInput(problem, where=f"objective.teacher_model={self.model}", hint="does the server add tokens to prompts?")
        rows = [self.place(token, entry, k, vocab) for token, entry in zip(ids[1:], places[1:], strict=True)]
        logps = np.array([[p for _, p in row] for row in rows], np.float64).reshape(-1, k)
        rest = np.log(np.maximum(1 - np.exp(logps).sum(1), LEAST_REST))
        token_ids = np.array([[token for token, _ in row] for row in rows], np.int64).reshape(-1, k)
        return TopTokens(token_ids, logps.astype(np.float32), rest.astype(np.float32))

    def place(self, token: int, entry: Any, k: int, vocab: int) -> list[tuple[int, float]]:
        """Reads the k most likely tokens at one position from a reply, the most likely first.

        Args:
            token: the token of the text at this position.
            entry: the server's JSON for this position.
        """
        if not isinstance(entry, dict) or str(token) not in entry:
            problem = f"{self.url} does not name token {token}, which it was given: its tokens are not this run's"
            raise BadInput(problem, where=f"objective.teacher_model={self.model}", hint="the teacher must have the student's tokenizer")
        pairs = []
        for name, fields in entry.items():
            number, logp = int(name), fields.get("logprob")
            self.check_token(number, fields.get("decoded_token"), vocab)
            if not isinstance(logp, int | float) or not math.isfinite(logp) or logp > 1e-3:
                problem = f"{self.url} gives token {number} the log-probability {logp!r}"
                raise ArgosyError(problem, hint="is the model that it serves whole?")
            pairs.append((number, float(logp)))
        pairs.sort(key=lambda pair: -pair[1])
        if len(pairs) < k:
            problem = f"{self.url} names {len(pairs)} tokens of a place, not {k}"
            hint = f"objective.top={len(pairs)}, or allow the server more (vLLM's --max-logprobs)"
            raise BadInput(problem, where="objective.top", hint=hint)
        return pairs[:k]

    def check_token(self, number: int, text: Any, vocab: int) -> None:
        """Compares a token of the server with the run's token of the same id.

        Raises:
            BadInput: the tokens differ.
        """
        piece = self.tokenizer.piece(number, False).decode("utf-8", "replace") if number < self.tokenizer.vocab else None
        same = text is None or piece is None or UNKNOWN in f"{piece}{text}" or piece.strip() == str(text).strip()
        same = same or number in self.tokenizer.hidden
        if number >= vocab or not same:
            theirs = f"`{text}`" if isinstance(text, str) else "another one"
            problem = f"token {number} is {theirs} to {self.url}, and {f'`{piece}`' if piece is not None else 'none'} to the student"
            raise BadInput(problem, where=f"objective.teacher_model={self.model}", hint="the teacher must have the student's tokenizer")

    # ---------------------------------------------------------------- HTTP

    def request(self, path: str, body: dict[str, Any]) -> Any:
        """Sends a request and returns the JSON reply. After transient errors the request is repeated a few times.

        Raises:
            BadInput: the server refuses the request.
            ArgosyError: the server does not reply.
        """
        where, message = f"{self.url.rstrip('/')}/{path}", ""
        for wait in (*WAITS_S, None):
            try:
                return self.request_once(where, body)
            except HTTPError as error:
                words = self.without_key(error.read().decode("utf-8", "replace"))
                message = f"HTTP {error.code}: {message_of(words)[:SHOWN]}"
                if error.code not in AGAIN:
                    raise _refusal(error.code, message, where, self.model) from None
                wait = retry_delay(error.headers.get("Retry-After"), wait)
            except (URLError, TimeoutError, OSError) as error:
                message = self.without_key(str(getattr(error, "reason", error)))[:SHOWN]
            except ValueError:
                message = "an answer that is not JSON"
            if wait is not None:
                self.sleep(wait)
        problem = f"the teacher's server does not answer after {len(WAITS_S) + 1} tries: {message}"
        raise ArgosyError(problem, hint=f"{where}; what it has said is kept, and the same command goes on")

    def request_once(self, where: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        if (key := _key_of()) is not None:
            headers["Authorization"] = f"Bearer {key}"
        request = Request(where, json.dumps(body).encode(), headers, method="POST")
        with build_opener(Unmoved()).open(request, timeout=TIMEOUT_S) as answer:
            return json.loads(answer.read())

    def without_key(self, text: str) -> str:
        """Removes the key from a server's error message, since some servers repeat it."""
        key = _key_of()
        return text.replace(key, "[key]") if key else text


def _key_of() -> str | None:
    """Returns the key for a server from the environment; None if there is none."""
    return next((os.environ[name] for name in KEYS if os.environ.get(name)), None)


def retry_delay(header: str | None, wait: float | None) -> float | None:
    """Returns the seconds to wait before the next try; None if there is no next try. A server's Retry-After counts, within bounds.

    Args:
        header: the value of Retry-After; None without one.
        wait: the default wait in seconds; None after the last try.
    """
    if wait is None or header is None or not header.strip().isdigit():
        return wait
    return min(max(float(header), wait), LONGEST_WAIT_S)


def message_of(words: str) -> str:
    """Extracts the error message from the body of a reply."""
    try:
        document = json.loads(words)
    except ValueError:
        return " ".join(words.split()) or "no words"
    error = document.get("error", document) if isinstance(document, dict) else document
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _refusal(code: int, message: str, where: str, model: str) -> BadInput:
    """Makes the error for a request that the server would refuse again."""
    hints = {
        401: f"set {KEYS[0]} in the environment",
        403: f"set {KEYS[0]} in the environment",
        404: f"is objective.teacher up to /v1, and objective.teacher_model={model} one of GET /v1/models?",
    }
    if "vocabulary" in message:
        hints[code] = "the teacher must have the student's tokenizer; objective=uld learns across tokenizers from a folder of weights"
    hint = hints.get(code, "objective.top may be above what the server allows (20 by vLLM's default), or a text above its context")
    return BadInput(f"the teacher's server refuses: {message}", where=where, hint=hint)
