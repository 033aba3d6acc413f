"""/v1/completions: prompts as text or token ids, in OpenAI's older shape."""

from collections.abc import Sequence
from typing import Any

from argosy.serve.answer import Job
from argosy.serve.choice import Choice, Names, Piece, Scored
from argosy.serve.errors import ApiError
from argosy.serve.fields import Completions
from argosy.serve.service import Service
from argosy.serve.structured import wanted_by

# OpenAI's and vLLM's default.
MAX_TOKENS = 16


def prepare(service: Service, body: Any) -> Job:
    """The work that a body of /v1/completions asks for.

    Raises:
        ApiError: it asks for what cannot be done.
    """
    fields = Completions.of(body)
    service.check(fields)
    wanted = wanted_by(fields, service.limits)
    if fields.echo and fields.logprobs is not None:
        raise ApiError("`echo` with `logprobs` is not supported", param="echo", code="unsupported_parameter")
    given = several(fields.prompt)
    prompts = [service.encode(one, fields.add_special_tokens) if isinstance(one, str) else one for one in given]
    requests = service.requests(fields, prompts, fields.max_tokens or MAX_TOKENS)
    texts = [echoed(service, one, fields) for one in given] if fields.echo else None
    return Job(service, fields, prompts, requests, Shape(service, fields, texts, prompts), wanted)


def several(prompt: Any, name: str = "prompt") -> list[str | list[int]]:
    """The prompts: a text, several texts, token ids, or several lists of token ids.

    Args:
        name: of the field, for errors.

    Raises:
        ApiError: something else.
    """
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(map(_is_id, prompt)):
            return [prompt]
        if all(isinstance(one, str) or (isinstance(one, list) and one and all(map(_is_id, one))) for one in prompt):
            return prompt
    raise ApiError(f"`{name}` is a text, a list of texts, a list of token ids, or a list of such lists", param=name)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def echoed(service: Service, prompt: str | list[int], fields: Completions) -> str:
    """The text of a prompt in front of its answers."""
    if isinstance(prompt, str) or service.lm.tokenizer is None:
        return prompt if isinstance(prompt, str) else ""
    return service.lm.tokenizer.decode(prompt, fields.skip_special_tokens)


class Shape:
    """Answers in the shape of /v1/completions.

    Args:
        texts: the text in front of each prompt's answers, None for none.
    """

    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def __init__(self, service: Service, fields: Completions, texts: list[str] | None, prompts: Sequence[list[int]]):
        self.fields, self.texts, self.prompts = fields, texts, prompts
        self.names = Names(service.lm.tokenizer, fields.return_tokens_as_token_ids)
        # Characters and tokens of each answer that were sent already.
        self._sent: dict[int, int] = {}

    def opening(self, place: int) -> dict[str, Any] | None:
        text = self._echo(place)
        return self._choice(place, text, None, None, None) if text else None

    def chunk(self, place: int, choice: Choice, piece: Piece) -> dict[str, Any]:
        start = self._sent.get(place, len(self._echo(place)))
        self._sent[place] = start + len(piece.text)
        found = self._choice(place, piece.text, self._scores(piece.tokens, start), piece.finish, choice.stop_reason)
        if self.fields.return_token_ids:
            found["token_ids"] = [one.token for one in piece.tokens]
        return found

    def choice(self, place: int, choice: Choice) -> dict[str, Any]:
        echo = self._echo(place)
        scores = self._scores(choice.tokens, len(echo))
        found = self._choice(place, echo + choice.text, scores, choice.finish, choice.stop_reason)
        if self.fields.return_token_ids:
            found["token_ids"] = [one.token for one in choice.tokens]
            found["prompt_token_ids"] = self.prompts[place // self.fields.n]
        return found

    def _echo(self, place: int) -> str:
        return self.texts[place // self.fields.n] if self.texts else ""

    def _choice(self, place: int, text: str, scores: Any, finish: str | None, reason: Any) -> dict[str, Any]:
        return {"index": place, "text": text, "logprobs": scores, "finish_reason": finish, "stop_reason": reason}

    def _scores(self, tokens: Sequence[Scored], offset: int) -> dict[str, Any] | None:
        """Log-probabilities as four lists. text_offset: characters before each token."""
        if self.fields.logprobs is None:
            return None
        names = [self.names(one.token) for one in tokens]
        offsets = []
        for name in names:
            offsets.append(offset)
            offset += len(name)
        return {
            "text_offset": offsets,
            "tokens": names,
            "token_logprobs": [one.logprob for one in tokens],
            "top_logprobs": [self._top(one) for one in tokens],
        }

    def _top(self, one: Scored) -> dict[str, float]:
        """The likeliest tokens by name, and the token itself, which may be none of them."""
        return {self.names(token): logprob for token, logprob in [*one.likeliest, (one.token, one.logprob)]}
