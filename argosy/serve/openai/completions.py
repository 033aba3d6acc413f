"""/v1/completions: completions of prompts given as text or token ids, in OpenAI's older format."""

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
    """Returns the prompts in a field that is a text, a list of texts, a list of token ids, or a list of lists of token ids.

    Args:
        prompt: the value of the field.
        name: the name of the field, for errors.

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
    """The text of a prompt, to put before its completions (`echo`).

    offsets: for each token of the prompt, the number of characters before it. A token that begins within a character has the offset of
        that character. A token without text, such as the beginning-of-sequence token, has the offset of the next token.
    """

    text: str = ""
    offsets: Sequence[int] = ()


def echo_of(service: Service, prompt: str | list[int], ids: list[int], fields: CompletionFields) -> Echo:
    """Makes the echo of a prompt.

    Args:
        prompt: the prompt as the client gave it.
        ids: its token ids.
    """
    tokenizer, is_text = service.lm.tokenizer, isinstance(prompt, str)
    if tokenizer is None:
        return Echo("", [0] * len(ids))
    # A prompt given as text is echoed without special tokens.
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
        # A character whose last bytes are in the completion is part of the completion's text.
        text = "".join(pieces)
    return Echo(text, [min(offset, len(text)) for offset in offsets])


class CompletionWriter(Choices):
    """Writes responses of /v1/completions.

    Args:
        echoes: the echo of each prompt; None: prompts are not echoed.
        prompts: the token ids of each prompt.
    """

    prefix, kind, part = "cmpl-", "text_completion", "text_completion"

    def __init__(self, service: Service, fields: CompletionFields, echoes: list[Echo] | None, prompts: Sequence[list[int]]):
        super().__init__(fields)
        self.fields, self.echoes, self.prompts = fields, echoes, prompts
        self.names = TokenNames(service.lm.tokenizer, fields.return_tokens_as_token_ids)
        # Number of characters of each completion that were sent so far.
        self._sent: dict[int, int] = {}

    def opened(self, place: int) -> dict[str, Any] | None:
        if self.echoes is None:
            return None
        # A completion without tokens ends at once.
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
        """Log-probabilities of a completion, after those of its prompt if that is echoed. They are null for the first token of a
        prompt, because no token is before it."""
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
        """Log-probabilities as four lists, as in OpenAI's API; None if they are not requested. `text_offset` is the number of
        characters that were final before each token.

        Args:
            pieces: the text that each token added.
            offset: number of characters before the first of these tokens.
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
        """The log-probabilities of the likeliest tokens and of the token itself, which may not be among them, by the tokens' text."""
        return {self.names(token): logprob for token, logprob in [*scored.likeliest, (scored.token, scored.logprob)]}
