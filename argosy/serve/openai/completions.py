"""/v1/completions: prompts as text or token ids, in OpenAI's older shape."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from argosy.serve.openai.beams import beam_searches, check_beams
from argosy.serve.openai.fields import CompletionFields
from argosy.serve.openai.structured import structure_request
from argosy.serve.response.choice import ChoicePiece, CompletionChoice, ScoredToken, TokenNames, scored_prompt
from argosy.serve.response.parsing import CompletionParts, CompletionReader
from argosy.serve.response.writer import Choices, GenerationJob
from argosy.serve.service import Service
from argosy.web.errors import ApiError

# OpenAI's and vLLM's default.
MAX_TOKENS = 16


def prepare_completions(service: Service, body: Any) -> GenerationJob:
    """Validates a body of /v1/completions and turns it into a job.

    Raises:
        ApiError: a field is invalid or unsupported.
    """
    fields = CompletionFields.of(body)
    service.check(fields)
    check_beams(fields)
    structured = structure_request(fields, service.limits)
    raw_prompts = read_prompts(fields.prompt)
    prompts = [service.encode(prompt, fields.add_special_tokens) if isinstance(prompt, str) else prompt for prompt in raw_prompts]
    most = MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    requests, searches = service.requests(fields, prompts, most), beam_searches(service, fields, prompts, most)
    echoes = [echo_of(service, *both, fields) for both in zip(raw_prompts, prompts, strict=True)] if fields.echo else None
    return GenerationJob(service, fields, prompts, requests, CompletionWriter(service, fields, echoes, prompts), structured,
    searches=searches)


def read_prompts(prompt: Any, name: str = "prompt") -> list[str | list[int]]:
    """The prompts: a text, several texts, token ids, or several lists of token ids.

    Args:
        name: name of the field, for errors.

    Raises:
        ApiError: the field has another type.
    """
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(map(_is_id, prompt)):
            return [prompt]
        if all(isinstance(element, str) or (isinstance(element, list) and element and all(map(_is_id, element))) for element in prompt):
            return prompt
    raise ApiError(f"`{name}` is a text, a list of texts, a list of token ids, or a list of such lists", param=name)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


@dataclass(frozen=True)
class Echo:
    """The text of a prompt in front of its answers.

    offsets: characters before each of its tokens; a token that begins within a character has the offset of that character, and one
        that is not in the text, such as the first of the model, those of the next.
    """

    text: str = ""
    offsets: Sequence[int] = ()


def echo_of(service: Service, prompt: str | list[int], ids: list[int], fields: CompletionFields) -> Echo:
    """The echo of a prompt. ids: its tokens."""
    tokenizer, is_text = service.lm.tokenizer, isinstance(prompt, str)
    if tokenizer is None:
        return Echo("", [0] * len(ids))
    # Special tokens are no part of a text that was given.
    skip = is_text or fields.skip_special_tokens
    if is_text and fields.logprobs is None:
        return Echo(str(prompt))
    stream, offsets, pieces, at = tokenizer.stream(skip), [], [], 0
    for token in ids:
        offsets.append(at)
        pieces.append(stream.push(token))
        at += len(pieces[-1])
    if isinstance(prompt, str):
        text = prompt
    elif fields.max_tokens == 0:
        text = tokenizer.decode(prompt, skip)
    else:
        # A character whose last bytes are still to come belongs to the answer, which writes it.
        text = "".join(pieces)
    return Echo(text, [min(offset, len(text)) for offset in offsets])


class CompletionWriter(Choices):
    """Responses of /v1/completions.

    Args:
        echoes: the text of each prompt, to put before its answers; None for none.
    """

    prefix, kind, part = "cmpl-", "text_completion", "text_completion"

    def __init__(self, service: Service, fields: CompletionFields, echoes: list[Echo] | None, prompts: Sequence[list[int]]):
        super().__init__(fields)
        self.fields, self.echoes, self.prompts = fields, echoes, prompts
        self.names = TokenNames(service.lm.tokenizer, fields.return_tokens_as_token_ids)
        # Characters of each answer sent so far.
        self._sent: dict[int, int] = {}

    def opened(self, place: int) -> dict[str, Any] | None:
        if self.echoes is None:
            return None
        # An answer of no tokens ends where it opens.
        finish = "length" if self.fields.max_tokens == 0 else None
        text, scores = self._echo(place), self._with_prompt(place, None)
        return self._choice(place, text, scores, finish, None) if text or scores or finish else None

    def chunk(self, place: int, choice: CompletionChoice, piece: ChoicePiece, parts: CompletionParts) -> dict[str, Any]:
        start = self._sent.get(place, len(self._echo(place)))
        self._sent[place] = start + len(piece.text)
        document = self._choice(place, piece.text, self._scores(piece.tokens, [piece.text], start), piece.finish, choice.stop_reason)
        if self.fields.return_token_ids:
            document["token_ids"] = [scored.token for scored in piece.tokens]
        return document

    def choice(self, place: int, choice: CompletionChoice, reader: CompletionReader) -> dict[str, Any]:
        echo = self._echo(place)
        scores = self._with_prompt(place, self._scores(choice.tokens, choice.pieces, len(echo)))
        document = self._choice(place, echo + choice.text, scores, choice.finish, choice.stop_reason)
        if self.fields.return_token_ids:
            document["token_ids"] = [scored.token for scored in choice.tokens]
            document["prompt_token_ids"] = self.prompts[place // self.fields.n]
        if (top := self.fields.prompt_logprobs) is not None:
            prompt = place // self.fields.n
            document["prompt_logprobs"] = self.names.prompt_logprobs(self.prompts[prompt], self.scores[prompt], top)
        return document

    def _echo(self, place: int) -> str:
        return self.echoes[place // self.fields.n].text if self.echoes else ""

    def _with_prompt(self, place: int, answer: dict[str, Any] | None) -> dict[str, Any] | None:
        """Log-probabilities of an answer behind those of its prompt, if that is echoed. Nothing is before its first token: null."""
        if self.echoes is None or self.fields.logprobs is None:
            return answer
        prompt = place // self.fields.n
        ids = self.prompts[prompt]
        tokens = scored_prompt(ids, self.scores[prompt], self.fields.logprobs)
        prompt_scores: dict[str, Any] = {
            "text_offset": list(self.echoes[prompt].offsets),
            "tokens": [self.names(token) for token in ids],
            "token_logprobs": [None, *(scored.logprob for scored in tokens)],
            "top_logprobs": [None, *(self._top(scored) for scored in tokens)],
        }
        return prompt_scores if answer is None else {name: prompt_scores[name] + answer[name] for name in prompt_scores}

    def _choice(self, place: int, text: str, scores: Any, finish: str | None, reason: Any) -> dict[str, Any]:
        return {"index": place, "text": text, "logprobs": scores, "finish_reason": finish, "stop_reason": reason}

    def _scores(self, tokens: Sequence[ScoredToken], pieces: Sequence[str], offset: int) -> dict[str, Any] | None:
        """Log-probabilities as four lists. text_offset: characters that were final before each token.

        Args:
            pieces: the text that each token added.
        """
        if self.fields.logprobs is None:
            return None
        names = [self.names(scored.token) for scored in tokens]
        offsets = []
        for _, piece in zip(tokens, pieces):
            offsets.append(offset)
            offset += len(piece)
        return {
            "text_offset": offsets,
            "tokens": names,
            "token_logprobs": [scored.logprob for scored in tokens],
            "top_logprobs": [self._top(scored) for scored in tokens],
        }

    def _top(self, scored: ScoredToken) -> dict[str, float]:
        """The likeliest tokens by name, and the token itself, which may be none of them."""
        return {self.names(token): logprob for token, logprob in [*scored.likeliest, (scored.token, scored.logprob)]}
