"""Serves an encoder: one thread computes the embeddings of texts, with texts of several clients in one forward pass.

An idle thread begins with the first text at once. Texts that arrive during a pass wait for the next one. Clients take turns: the
longest text of the client whose turn it is sets the length of the pass, and other texts of at most this length, of any client, fill the
pass. So a client with a thousand texts delays another client by one pass only.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

from argosy.core.counts import plural
from argosy.core.errors import ArgosyError
from argosy.core.progress import Say
from argosy.infer.completions import Prompt
from argosy.infer.embed import SentenceEncoder
from argosy.infer.forward.sequences import length_bucket
from argosy.serve.engine.admission import Computing, timed_out
from argosy.serve.metrics import EncoderMetrics
from argosy.serve.service import MANY, ServedModel
from argosy.serve.settings import ServerLimits
from argosy.web.errors import ApiError, input_error

# The shortest length that programs are compiled for, in tokens. A pass over a sentence of 20 tokens takes 24, and not 32 as in
# `lm.embed`: 11.4 instead of 14.1 ms of CPU time for MiniLM.
SHORTEST = 16
# The ratio between the numbers of texts that a pass may have: 1, 4, 16, 64. With a ratio of 2, MiniLM would have 30 programs, not 19.
STEP = 4


@dataclass(eq=False)
class TextBatch:
    """The texts of one request. The thread writes `left`, the event loop all other fields.

    rows: the token ids of each text.
    vectors: the pooled vectors, filled as they are computed.
    result: the future that gets `vectors` once all are there.
    left: indices of the texts that are in no pass yet, the longest last.
    missing, missing_tokens: number of texts without a vector, and of their tokens.
    arrived: when the request arrived, on the clock of `time.monotonic`.
    abandoned: whether nobody waits for the vectors any more.
    """

    rows: Sequence[list[int]]
    vectors: Float[np.ndarray, "N D"]
    result: "asyncio.Future[Float[np.ndarray, 'N D']]"
    left: list[int] = field(init=False)
    missing: int = field(init=False)
    missing_tokens: int = field(init=False)
    arrived: float = field(default_factory=time.monotonic)
    abandoned: bool = False

    def __post_init__(self) -> None:
        self.missing = len(self.rows)
        self.missing_tokens = sum(map(len, self.rows))
        self.left = sorted(range(self.missing), key=lambda place: len(self.rows[place]))

    def fail(self, error: ApiError) -> None:
        if not self.result.done():
            self.result.set_exception(error)


Place = tuple[TextBatch, int]


class EncoderFront(Computing[TextBatch, EncoderMetrics]):
    """The thread that runs an encoder, and admission to it.

    Args:
        budget: tokens of a forward pass, padding included. A longer text has a pass of its own.
        name: the name of the model.
    """

    def __init__(self, encoder: SentenceEncoder, budget: int, limits: ServerLimits, name: str):
        self.engine, self.budget = encoder, budget
        self.running = 0
        metrics = EncoderMetrics(
            name, lambda: len(encoder.shapes), lambda: self.running, lambda: max(self.waiting - self.running, 0)
        )
        super().__init__(limits, metrics)

    def says(self, say: Say | None) -> None:
        """Sets the function that is called with the name of a program that is being compiled, if that takes longer than a second."""
        self.engine.say = say

    async def vectors(self, rows: Sequence[list[int]]) -> Float[np.ndarray, "N D"]:
        """Computes the pooled vectors of sequences. If the caller is cancelled, sequences that are in no pass yet are not computed.

        Args:
            rows: the token ids of each sequence.

        Raises:
            ApiError: too many texts wait already, time ran out, the server is shutting down, or the thread has stopped.
        """
        self._loop = asyncio.get_running_loop()
        self._check([len(row) for row in rows])
        vectors = np.zeros((len(rows), self.engine.lm.config.embedding_width), np.float32)
        texts = TextBatch(rows, vectors, self._loop.create_future())
        self.opened.add(texts)
        self.waiting += texts.missing
        self.waiting_tokens += texts.missing_tokens
        reason = "abort"
        try:
            self._tasks.put(texts)
            async with asyncio.timeout(self.limits.seconds):
                pooled = await texts.result
            reason = "stop"
            return pooled
        except TimeoutError:
            raise timed_out(self.limits.seconds) from None
        finally:
            texts.abandoned = True
            self.waiting -= texts.missing
            self.waiting_tokens -= texts.missing_tokens
            self.metrics.ended(reason, time.monotonic() - texts.arrived)
            self._closed(texts)

    def _take(self, places: Sequence[Place], vectors: Float[np.ndarray, "N D"], start: float) -> None:
        """Hands the vectors of a pass to the requests that wait for them. `start` is when the pass began."""
        for (texts, place), vector in zip(places, vectors, strict=True):
            if texts.abandoned:
                continue
            length = len(texts.rows[place])
            texts.vectors[place] = vector
            texts.missing -= 1
            texts.missing_tokens -= length
            self.waiting -= 1
            self.waiting_tokens -= length
            self.metrics.began(length, start - texts.arrived)
            if not texts.missing and not texts.result.done():
                texts.result.set_result(texts.vectors)

    # ---------------------------------------------------------------- the thread's side

    def _work(self) -> None:
        turns: list[TextBatch] = []
        while True:
            while self.failure is not None or not turns or not self._tasks.empty():
                if (texts := self._tasks.get()) is None:
                    return
                turns.append(texts)
            turns = [texts for texts in turns if texts.left and not texts.abandoned]
            if not turns:
                continue
            places, shape = next_pass(turns, self.budget, self.engine.context)
            turns.append(turns.pop(0))
            for texts, place in places:
                texts.left.remove(place)
            self.running, start = len(places), time.monotonic()
            try:
                vectors = self.engine.pooled([texts.rows[place] for texts, place in places], shape)
                self._tell(lambda places=places, vectors=vectors, start=start: self._take(places, vectors, start))
            except Exception as error:
                self._failed(error)
            finally:
                self.running = 0


def next_pass(turns: Sequence[TextBatch], budget: int, context: int) -> tuple[list[Place], tuple[int, int]]:
    """Chooses the texts of the next forward pass. Returns them, and the shape of the pass in rows and tokens.

    Args:
        turns: the requests with texts left. It is the first one's turn.
        budget: tokens of a pass, padding included.
        context: tokens of the longest text.
    """
    first = (turns[0], turns[0].left[-1])
    length = min(length_bucket(len(first[0].rows[first[1]]), SHORTEST), context)
    fit = [(texts, place) for texts in turns for place in texts.left if len(texts.rows[place]) <= length]
    # The sort is stable: of equally long texts, those of earlier turns come first.
    fit.sort(key=lambda pair: (pair != first, -len(pair[0].rows[pair[1]])))
    rows = pass_rows(len(fit), budget // length)
    return fit[:rows], (rows, length)


def pass_rows(texts: int, most: int) -> int:
    """The number of rows of a pass: the largest one that these texts fill by more than half, or 1.

    Args:
        texts: number of texts that fit into the pass.
        most: the most rows.
    """
    rows = 1
    while rows * STEP <= most and texts > rows * STEP // 2:
        rows *= STEP
    return rows


def pass_shapes(budget: int, context: int) -> Iterator[tuple[int, int]]:
    """Yields every shape that `next_pass` may return."""
    length = 0
    while length < context:
        length = min(length_bucket(length + 1, SHORTEST), context)
        rows = 1
        yield rows, length
        while (rows := rows * STEP) * length <= budget:
            yield rows, length


@dataclass
class EncoderService(ServedModel[EncoderFront]):
    """A served encoder."""

    @property
    def context(self) -> int:
        """The most tokens of a text, including [CLS] and [SEP]."""
        return self.front.engine.context

    @property
    def about(self) -> list[str]:
        return [f"{self.name}: vectors of {self.lm.config.embedding_width} numbers for texts of up to {self.context} tokens"]

    def tokenized(self, text: str, special: bool) -> list[int]:
        try:
            return self.front.engine.ids([text], special=special)[0] if text or special else []
        except ArgosyError as error:
            raise input_error(error, "prompt") from None

    def prompt(self, name: str | None) -> str:
        """The prompt with this name; None: the default prompt.

        Raises:
            ApiError: the model has no such prompt.
        """
        try:
            return self.front.engine.steps.prompt_named(name)
        except ArgosyError as error:
            raise input_error(error, "prompt_name") from None

    def rows(
        self, texts: Sequence[Prompt], most: int | None, param: str, *, special: bool = True, prompt_name: str | None = None
    ) -> list[list[int]]:
        """Returns the token ids of texts. Slow.

        Args:
            most: truncates texts to this many tokens; -1: to the context; None: longer texts are an error.
            param: the field that the texts came in, for errors.
            special: whether to put the model's special tokens around texts.
            prompt_name: the name of the prompt to put before texts; None: the default prompt.

        Raises:
            ApiError: there are no texts or too many, one is too long or has ids outside the vocabulary, or there is no such prompt.
        """
        if not texts:
            raise ApiError(f"`{param}` is empty", param=param)
        if len(texts) > self.limits.texts:
            raise ApiError(f"{plural(len(texts), 'text')}, at most {self.limits.texts}", param=param)
        if most is not None and most > self.context:
            problem = f"`truncate_prompt_tokens` is {most}, the context of the model {self.context}"
            raise ApiError(problem, param="truncate_prompt_tokens")
        if most in (0, 1):
            raise ApiError("`truncate_prompt_tokens` is -1, or at least 2", param="truncate_prompt_tokens")
        most = self.context if most == -1 else most
        prompt = self.prompt(prompt_name)
        if prompt_name is not None and param == "input" and not all(isinstance(t, str) for t in texts):
            raise ApiError("`prompt_name` is for texts; token ids are used as they are", param="prompt_name")
        try:
            rows = self.front.engine.ids([t if isinstance(t, str) else t[:most] for t in texts], most, special=special, prompt=prompt)
        except ArgosyError as error:
            raise input_error(error, param) from None
        for place, ids in enumerate(rows):
            if len(ids) > self.context:
                problem = f"text {place} has {plural(len(ids), 'token')}, more than the context of {self.context}"
                raise ApiError(f"{problem}; `truncate_prompt_tokens: -1` cuts it", param=param, code=MANY)
        return rows
