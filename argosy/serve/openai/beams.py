"""Beam search over HTTP (`use_beam_search`). In each step the engine samples one token of each beam, together with other requests.

A search counts as one request of its client, from its first step to its last. Limits, disconnects and `Front.abort` apply to it as to
any request. The engine gets one request for each beam and step, which finds the pages of its beam in the prefix cache. All of them run
on one copy of the model.
"""

from collections.abc import Sequence
from typing import Any

from argosy.infer.engine.request import Event, FinishReason, Request
from argosy.infer.sampling.beam import Beam, Beams
from argosy.infer.sampling.sampler import MOST_TOP
from argosy.serve.openai.fields import GenerationFields
from argosy.serve.response.streams import EventStreams
from argosy.serve.service import Service
from argosy.web.errors import ApiError

# Fields that a search cannot honor, each with the values that have no effect and are accepted.
REFUSED: dict[str, tuple[Any, ...]] = {
    "temperature": (None, 0),
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "typical_p": (None, 1),
    "repetition_penalty": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "min_tokens": (None, 0),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "repetition_detection": (None,),
    "stop": ([],),
}


def check_beams(fields: GenerationFields) -> None:
    """Checks that a request for a beam search has no field that a search cannot honor.

    Raises:
        ApiError: it has one.
    """
    if not fields.use_beam_search:
        if fields.length_penalty != 1:
            raise ApiError("`length_penalty` needs `use_beam_search: true`", param="length_penalty")
        return
    if fields.stream:
        problem = "the answers of a beam search are known at its end: there is no `stream` of them, as in vLLM"
        raise ApiError(problem, param="stream", code="unsupported_parameter")
    for name, neutral in REFUSED.items():
        if getattr(fields, name) not in neutral:
            raise ApiError(f"`{name}` is not supported with `use_beam_search`", param=name, code="unsupported_parameter")
    if 2 * fields.n > MOST_TOP:
        raise ApiError(f"`n` is {fields.n}, and a search has at most {MOST_TOP // 2} beams", param="n")


class BeamRequest:
    """The beam search for the completions of one prompt.

    cached: number of prompt tokens found in the prefix cache.
    aborted: whether the search was ended early.

    Args:
        beams: the state of the search.
        top: number of likeliest tokens to report with each token.
        options: further fields of its engine requests.
    """

    def __init__(self, beams: Beams, top: int, options: dict[str, Any]):
        self.beams, self.top, self.options = beams, top, options
        self.cached, self.aborted = 0, False

    def requests(self) -> list[Request]:
        """The engine requests of the next step."""
        return self.beams.requests(self.top, **self.options)

    async def run(self, answers: EventStreams) -> None:
        """Runs the search to its end.

        Args:
            answers: the opened streams of the first `requests`.

        Raises:
            ApiError: as iterating over `answers`.
        """
        events = await answers.ended()
        self.cached = answers.reused(0)
        while not any(event.token is None for event in events):
            self.beams.take([[event] for event in events])
            if not self.beams.open:
                return
            events = await answers.more(self.requests())
        self.aborted = True

    def events(self) -> list[list[Event]]:
        """The events of each completion, the best first, as if it had been sampled. A search that was ended early returns its complete
        beams first, then its open ones."""
        beams = self.beams
        answers = [_events(beam, "length" if beam.ended_by is None else "stop") for beam in beams.best()]
        answers += [_events(beam, "abort") for beam in beams.open]
        nothing = [Event(0, None, 0.0, "abort")]
        return [*answers, *[nothing] * beams.width][: beams.width]


def _events(beam: Beam, reason: FinishReason) -> list[Event]:
    tokens = [*beam.tokens, *(() if beam.ended_by is None else (beam.ended_by,))]
    events = [Event(0, token, logprob, None, top=top) for token, logprob, top in zip(tokens, beam.logprobs, beam.tops, strict=True)]
    if reason == "abort":
        return [*events, Event(0, None, 0.0, reason)]
    return [*events[:-1], events[-1]._replace(finish_reason=reason)]


def beam_searches(service: Service, fields: GenerationFields, prompts: Sequence[list[int]], most: int | None) -> list[BeamRequest]:
    """Makes a beam search for each prompt; none if the request asks for no beam search.

    Args:
        prompts: the token ids of each prompt, which `Service.requests` has checked.
        most: as in `Service.requests`.
    """
    if not fields.use_beam_search or most == 0:
        return []
    options = {"salt": fields.cache_salt or "", "adapter": service.adapter_of(fields.model)}
    context, ends = service.context, service.ends(fields)
    searches = (Beams(ids, fields.n, most or context - len(ids), ends, fields.length_penalty) for ids in prompts)
    return [BeamRequest(beams, fields.top or 0, options) for beams in searches]
