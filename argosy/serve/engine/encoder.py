"""An encoder, served: one thread computes the vectors of texts, those of several clients in one forward pass.

A text waits for the passes before it, never for company: an idle thread begins at once, and takes what has come meanwhile into the
next pass. Clients take turns: the longest text of the client whose turn it is sets the length of a pass, and texts of any client
that are as long or a little shorter fill it up. A client with a thousand texts so delays another one by a pass.
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
# Between the numbers of texts of a pass: 1, 4, 16, 64. Powers of two would mean 30 programs to compile for MiniLM instead of 19.
STEP = 4


@dataclass(eq=False)
class TextBatch:
    """The texts of one request. The thread writes `left`, the event loop everything else.

    left: places of the texts that are in no pass yet, the longest last.
    missing, missing_tokens: texts without a vector.
    abandoned: nobody waits for them.
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
    """The thread around an encoder.

    Args:
        budget: tokens of a forward pass, padding included. A text longer than that has a pass of its own.
        name: the model's.
    """

    def __init__(self, encoder: SentenceEncoder, budget: int, limits: ServerLimits, name: str):
        self.engine, self.budget = encoder, budget
        self.running = 0
        metrics = EncoderMetrics(
            name, lambda: len(encoder.shapes), lambda: self.running, lambda: max(self.waiting - self.running, 0)
        )
        super().__init__(limits, metrics)

    def says(self, say: Say | None) -> None:
        """Sets the function that the encoder calls with the programs that it compiles, if that takes longer than a second."""
        self.engine.say = say

    async def vectors(self, rows: Sequence[list[int]]) -> Float[np.ndarray, "N D"]:
        """The pooled vectors of these sequences. Texts that are in no pass yet when the caller is cancelled are not computed.

        Raises:
            ApiError: too many wait already, the time is up, the server shuts down, or the thread has stopped.
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
        """Hands the vectors of a pass to those who wait for them."""
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
    """The texts of the next forward pass, and its shape in rows and tokens.

    Args:
        turns: requests with texts left; the first has its turn.
        budget: tokens of a pass. context: the longest text.
    """
    first = (turns[0], turns[0].left[-1])
    length = min(length_bucket(len(first[0].rows[first[1]]), SHORTEST), context)
    fit = [(texts, place) for texts in turns for place in texts.left if len(texts.rows[place]) <= length]
    # Stable: of equally long texts, those come first whose turn is earlier.
    fit.sort(key=lambda pair: (pair != first, -len(pair[0].rows[pair[1]])))
    rows = pass_rows(len(fit), budget // length)
    return fit[:rows], (rows, length)


def pass_rows(texts: int, most: int) -> int:
    """The rows of a pass: a size of which these texts fill more than half, or 1."""
    rows = 1
    while rows * STEP <= most and texts > rows * STEP // 2:
        rows *= STEP
    return rows


def pass_shapes(budget: int, context: int) -> Iterator[tuple[int, int]]:
    """Every shape that `next_pass` gives."""
    length = 0
    while length < context:
        length = min(length_bucket(length + 1, SHORTEST), context)
        rows = 1
        yield rows, length
        while (rows := rows * STEP) * length <= budget:
            yield rows, length


@dataclass
class EncoderService(ServedModel[EncoderFront]):
    """An encoder: its texts become vectors."""

    @property
    def context(self) -> int:
        """The longest text in tokens, [CLS] and [SEP] included."""
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
        """The prompt of this name; None: that of texts for which none is named.

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
        """The ids of texts. Slow.

        Args:
            most: cuts texts to so many tokens; -1: to the context; None: longer ones are an error.
            param: the field that they came in, for errors.
            special: puts the model's special tokens around texts.
            prompt_name: names the prompt that is put before texts; None: the default one.

        Raises:
            ApiError: no text, too many, one that is too long, ids that are no tokens, or no such prompt.
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
