"""Completions of prompts as text. The engine below knows token ids only."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from argosy.core.errors import BadInput
from argosy.infer.detokenize import Detokenizer, token_spellings
from argosy.infer.engine.request import Event, Request
from argosy.infer.sampling.beam import Beam, Beams
from argosy.infer.sampling.repetition import Repetition
from argosy.infer.sampling.sample import Sampling, Seed, seed_words
from argosy.infer.tools.grammar import Grammar

Prompt = str | Sequence[int]
Reason = Literal["stop", "length", "blocked", "repetition"]


@dataclass
class Completion:
    """The completion to one prompt.

    text: the text of the completion, without the stop string that ended it.
    tokens: the token ids, without the token that ended it.
    finish_reason: why it ended; None: it has not. `repetition`: it repeated itself. `blocked`: no token was allowed, because all that
        its grammar allows are banned, or the grammar has become too complex.
    prompt_tokens: number of prompt tokens.
    logprobs: the log-probability of each token by the model alone, before bias, mask, penalties, temperature and filters.
    drawn: the log-probability of each token in the distribution that it was drawn from; 0 at temperature 0.
    top: for each token, the likeliest tokens in its place with their log-probabilities, if they were asked for.
    stopped_by: the token id or the stop string that ended it; None: neither did.
    """

    text: str
    tokens: list[int]
    finish_reason: Reason | None
    prompt_tokens: int
    logprobs: list[float]
    drawn: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    stopped_by: int | str | None = None


@dataclass(frozen=True)
class CompletionPiece:
    """Text that a step added to a completion, in whole characters.

    row: index of the completion's prompt.
    text: the added text, which may be empty.
    done: whether the completion has ended.
    """

    row: int
    text: str
    done: bool


class CompletionStream:
    """Prompts that are being completed. Iterating yields the text that each token adds. At the end `completions` is complete.

    Args:
        lm: an `infer.lm.LM`. The other arguments are those of its method `generate`.
    """

    def __init__(
        self,
        lm: Any,
        prompts: Sequence[Prompt],
        max_tokens: int,
        *,
        stop: Sequence[str] = (),
        stop_tokens: Sequence[int] = (),
        ignore_eos: bool = False,
        seed: Seed = 0,
        top: int = 0,
        structured: Mapping[str, Any] | Grammar | None = None,
        repetition: Repetition | None = None,
        adapter: str | None = None,
        **sampling: Any,
    ):
        seed_words(seed)
        if adapter is not None:
            lm.adapter(adapter)
        self.lm = lm
        ids = _encoded(lm, prompts, max_tokens, "generate")
        settings, ends = _sampling(lm, sampling), _ends(lm, stop_tokens, ignore_eos)
        grammar = lm.grammar(structured) if isinstance(structured, Mapping) else structured
        self.requests = [
            Request(prompt, max_tokens, settings, ends, seed, row, top, grammar=grammar, adapter=adapter, repetition=repetition)
            for row, prompt in enumerate(ids)
        ]
        self.completions = [Completion("", [], None, len(prompt), []) for prompt in ids]
        self._texts = [Detokenizer(lm.tokenizer, prompt, list(stop), begun=grammar is not None) for prompt in ids]
        self._pieces = self._run()

    def __iter__(self) -> Iterator[CompletionPiece]:
        return self._pieces

    def close(self) -> None:
        """Ends the completions that are still running, and frees their KV-cache pages."""
        self._pieces.close()

    def _run(self) -> Generator[CompletionPiece, None, None]:
        context = self.lm.longest
        lengths = [min(len(request.tokens) + request.max_tokens, context) for request in self.requests]
        engine = self.lm.engine(lengths)
        rows: dict[int, int] = {}
        try:
            for row, request in enumerate(self.requests):
                rows[engine.add(request)] = row
            while rows:
                for event in engine.collect(rows):
                    if event.id not in rows:
                        continue
                    piece = self._take(rows[event.id], event)
                    if piece.done:
                        engine.end(event.id)
                        del rows[event.id]
                    yield piece
        except GeneratorExit:
            raise
        except BaseException:
            # The engine's state is undefined after an interrupted step, such as by Ctrl-C.
            self.lm.forget()
            raise
        finally:
            for number in rows:
                engine.end(number)

    def _take(self, row: int, event: Event) -> CompletionPiece:
        """Adds a token to a completion."""
        done, text, token = self.completions[row], self._texts[row], event.token
        if token is None:
            if event.finish_reason not in ("stop", "blocked"):
                raise RuntimeError(f"request {event.id} was aborted")
            return self._end(row, event.finish_reason, None)
        if event.finish_reason == "stop":
            return self._end(row, "stop", token)
        done.tokens.append(token)
        done.logprobs.append(event.logprob)
        done.drawn.append(event.drawn)
        if event.top:
            done.top.append(list(event.top))
        new = text.push(token, may_stop=len(done.tokens) > self.requests[row].sampling.min_tokens)
        done.text += new
        if text.stopped is not None:
            return self._end(row, "stop", text.stopped, new)
        if event.finish_reason in ("length", "repetition"):
            return self._end(row, event.finish_reason, None, new)
        return CompletionPiece(row, new, False)

    def _end(self, row: int, reason: Reason, by: int | str | None, new: str = "") -> CompletionPiece:
        done, rest = self.completions[row], self._texts[row].end()
        done.text += rest
        done.finish_reason, done.stopped_by = reason, by
        return CompletionPiece(row, new + rest, True)


def beam_search(
    lm: Any,
    prompts: Sequence[Prompt],
    max_tokens: int,
    beam_width: int,
    length_penalty: float,
    stop_tokens: Sequence[int],
    ignore_eos: bool,
    adapter: str | None,
) -> list[list[Completion]]:
    """As `LM.beam_search`."""
    if adapter is not None:
        lm.adapter(adapter)
    rows, ends, context = _encoded(lm, prompts, max_tokens, "beam_search"), _ends(lm, stop_tokens, ignore_eos), lm.longest
    searches = [Beams(ids, beam_width, min(max_tokens, context - len(ids)), ends, length_penalty) for ids in rows]
    engine = lm.engine([min(len(ids) + max_tokens, context) for ids in rows for _ in range(beam_width)])
    try:
        while running := [search for search in searches if search.open]:
            requests = [replace(request, adapter=adapter) for search in running for request in search.requests()]
            answers = iter(engine.generate(requests))
            for search in running:
                search.take([next(answers) for _ in search.open])
    except BaseException:
        lm.forget()
        raise
    return [[_completed(lm, search.prompt, beam) for beam in search.best()] for search in searches]


def _completed(lm: Any, prompt: list[int], beam: Beam) -> Completion:
    text = Detokenizer(lm.tokenizer, prompt, [])
    whole = "".join([*(text.push(token) for token in beam.tokens), text.end()])
    reason: Reason = "length" if beam.ended_by is None else "stop"
    tokens, logprobs = list(beam.tokens), list(beam.logprobs[: len(beam.tokens)])
    return Completion(whole, tokens, reason, len(prompt), logprobs, stopped_by=beam.ended_by)


def _encoded(lm: Any, prompts: Sequence[Prompt], max_tokens: int, method: str) -> list[list[int]]:
    lm.check_predicts()
    check_prompts(prompts, method)
    if max_tokens < 1:
        raise BadInput(f"max_tokens = {max_tokens}", hint="at least 1")
    ids = [lm.encode(p) for p in prompts]
    for prompt in ids:
        if not prompt:
            raise BadInput("an empty prompt, and the model has no beginning-of-sequence token", hint="give some text")
        lm.check_ids(prompt, len(prompt))
    if max(map(len, ids)) >= lm.longest:
        whose = "the model's" if lm.longest == lm.config.context else "the engine's"
        raise BadInput(f"the prompt fills {whose} context of {lm.longest} tokens", hint="shorten it")
    return ids


def _ends(lm: Any, stop_tokens: Sequence[int], ignore_eos: bool) -> frozenset[int]:
    return frozenset(stop_tokens) | frozenset(() if ignore_eos else lm.stops())


def check_prompts(prompts: Sequence[Any], method: str) -> None:
    """Checks that `prompts` is a list of prompts.

    Args:
        method: the name of the method of `LM`, for the error message.

    Raises:
        BadInput: the list is empty, or consists of messages, or of the token ids of one prompt.
    """
    if not prompts:
        raise BadInput("no prompt")
    first = [p[0] if isinstance(p, list | tuple) and p else p for p in prompts]
    if any(isinstance(element, Mapping) for element in first):
        raise BadInput(f"{method} takes prompts, not messages", hint=f"lm.{method}([lm.chat_prompt(messages)])")
    if any(isinstance(p, int | np.integer) for p in prompts):
        raise BadInput(f"{method} takes a list of prompts, not one list of token ids", hint=f"lm.{method}([ids])")


def _sampling(lm: Any, options: Mapping[str, Any]) -> Sampling:
    from argosy.core.settings import SettingsLayer, read_settings

    options = dict(options)
    if "bad_words" in options:
        words = [token_spellings(lm.tokenizer, w) if isinstance(w, str) else [token_ids(w).tolist()] for w in options["bad_words"]]
        options["bad_words"] = [ids for spelt in words for ids in spelt]
    sampling = read_settings(Sampling, SettingsLayer("generate", options)).value
    filters = ("top_k", "top_p", "min_p", "typical_p")
    idle = [name for name in filters if name in options and name in sampling.model_fields_set]
    if idle and not sampling.temperature:
        raise BadInput(f"{', '.join(idle)}: no effect at temperature 0", hint="set temperature, such as 0.7")
    return sampling


def token_ids(tokens: Any) -> np.ndarray:
    """Converts token ids to an array of whole numbers.

    Raises:
        BadInput: rows have unequal lengths, or values are not whole numbers.
    """
    try:
        ids = np.asarray(tokens)
    except ValueError:
        raise BadInput(
            "rows of tokens have unequal lengths", hint="call logits once per row"
        ) from None
    if ids.size and not np.issubdtype(ids.dtype, np.integer):
        raise BadInput(f"token ids are whole numbers, not {ids.dtype}")
    return ids

