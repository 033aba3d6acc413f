"""Several copies of a model behind one server (data-parallel serving): a front for each copy, and one that distributes requests over
them.

A request goes to the least busy copy, where a waiting sequence counts as four running ones, as in vLLM. A copy that is at most `SLACK`
busier gets the request if its prefix cache has more of the prompt, so a conversation finds its earlier turns. Equal copies take turns.
All completions of one prompt run on one copy, because they share the prompt's pages. The prompts of one request are distributed
separately.

New weights and adapters are applied to all copies between two steps, while none computes, or to none. If one copy fails, the server
refuses all requests, because a server that works in part would hide the failure.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from argosy.core.progress import Say
from argosy.infer.engine.engine import Engine
from argosy.infer.engine.pages import page_hashes
from argosy.infer.engine.request import Event, Request
from argosy.infer.prompt_logprobs import PromptScorer, PromptScores
from argosy.serve.engine.admission import Admission
from argosy.serve.engine.front import Front, PauseMode
from argosy.serve.metrics import AllMetrics
from argosy.serve.response.streams import Arrivals, EventStreams, StreamPart
from argosy.serve.settings import ServerLimits
from argosy.web.errors import ApiError

R = TypeVar("R")
# How much busier than the least busy copy the one with the longest cached prefix may be: one waiting sequence. With two copies and 8
# clients in conversations, 66 % of the prompt tokens are found in a cache. If the prefix decided only between equally busy copies, it
# would be 47 %, and 50 % if copies took turns.
SLACK = 4
# Up to this many prompt tokens, hashing takes less time than handing it to a thread.
FEW_TOKENS = 4096


@dataclass(eq=False)
class RequestGroup:
    """One prompt of a client request. Its completions, and its log-probabilities if they are requested, are computed by one copy.

    places: indices of its completions among those of the client request.
    scored: indices of the prompt among the prompts to score.
    """

    places: list[int] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)

    @property
    def load(self) -> int:
        """The load that the prompt adds to a copy."""
        return 4 * (len(self.places) + len(self.scored))


class RequestParts:
    """The events of one client request from several copies of the model, with the methods of `EventStreams`.

    Args:
        parts: the streams of each copy.
        scored: the indices of the prompts that each copy scores.
        news: the queue that all streams put their events into.
    """

    def __init__(self, parts: Sequence[EventStreams], scored: Sequence[Sequence[int]], news: Arrivals):
        self.parts, self.names, self._scored, self._news = parts, parts[0].names, scored, news
        self._rows = {row.place: (part, at) for part in parts for at, row in enumerate(part.rows)}

    def __aiter__(self) -> "RequestParts":
        return self

    async def __anext__(self) -> tuple[int, Event]:
        """The next event and the index of its request, as in `EventStreams`."""
        while not (self._news.empty() and all(row.done for part in self.parts for row in part.rows)):
            item = await self._news.get()
            if isinstance(item, ApiError):
                raise item
            part, at = self._rows[item[0]]
            if not part.rows[at].left:
                return item
        raise StopAsyncIteration

    async def scored(self) -> list[PromptScores]:
        """The scores of the prompts in their order, as in `EventStreams`."""
        scores: dict[int, PromptScores] = {}
        for part, places in zip(self.parts, self._scored, strict=True):
            if places:
                scores |= zip(places, await part.scored(), strict=True)
        return [scores[place] for place in range(len(scores))]

    def end(self, place: int, reason: str) -> None:
        """Ends one completion early, as in `EventStreams`."""
        part, at = self._rows[place]
        part.end(at, reason)

    def abort(self) -> None:
        """Aborts all completions, as in `EventStreams`."""
        for part in self.parts:
            part.abort()

    def fail(self, error: ApiError) -> None:
        """Ends all completions with this error."""
        for part in self.parts:
            part.fail(error)

    def reused(self, place: int) -> int:
        """The number of prompt tokens from the prefix cache, as in `EventStreams`."""
        part, at = self._rows[place]
        return part.reused(at)


class ReplicaPrompts:
    """The prompt scorers of all copies. Programs are compiled for all of them, because it is not known yet which copy will score a
    prompt."""

    def __init__(self, each: Sequence[PromptScorer]):
        self.each, self.longest = each, min(scorer.longest for scorer in each)

    def missing(self, prompts: Sequence[Sequence[int]]) -> set[tuple[int, int]]:
        """The sizes of programs that any copy still lacks for these prompts."""
        return {size for scorer in self.each for size in scorer.missing(prompts)}

    def compile(self, sizes: Iterable[tuple[int, int]]) -> int:
        """Compiles programs of these sizes on all copies. Returns how many were compiled."""
        sizes = list(sizes)
        return sum(scorer.compile(sizes) for scorer in self.each)

    def forget(self) -> None:
        """As `PromptScorer.forget`, for all prompts on all copies."""
        for scorer in self.each:
            scorer.forget()


class ReplicaFront(Admission["Answers | Spread", AllMetrics]):
    """The fronts of all copies, with the interface of one front. Limits apply to the sums over all copies."""

    def __init__(self, fronts: Sequence[Front], limits: ServerLimits):
        super().__init__(limits, AllMetrics([front.metrics for front in fronts]))
        self.fronts = fronts
        self.prompts = ReplicaPrompts([front.prompts for front in fronts])
        self._turn = 0
        # Two calls of `together` at the same time would block each other.
        self._alone = asyncio.Lock()
        for front in fronts:
            front.broken = self.end_all

    @property
    def engine(self) -> Engine:
        """The engine of the first copy. All copies have the same context and adapters, and equal models."""
        return self.fronts[0].engine

    @property
    def engines(self) -> Sequence[Engine]:
        return [front.engine for front in self.fronts]

    @property
    def failed(self) -> bool:
        return any(front.failed for front in self.fronts)

    @property
    def queue(self) -> tuple[int, int]:
        waiting, tokens = zip(*(front.queue for front in self.fronts), strict=True)
        return sum(waiting), sum(tokens)

    def described(self) -> str:
        """Describes the sizes of the caches as text."""
        each = [front.described() for front in self.fronts]
        same = f"{len(each)} copies with {each[0]} each"
        return same if len(set(each)) == 1 else "; ".join(f"copy {i}: {size}" for i, size in enumerate(each))

    def says(self, say: Say | None) -> None:
        """Sets the function that reports slow compilations of all copies, as in `Front`."""
        for front in self.fronts:
            front.says(say)

    def start(self) -> None:
        """Starts the threads."""
        for front in self.fronts:
            front.start()

    def close(self) -> None:
        """Ends the threads after their current steps."""
        for front in self.fronts:
            front.close()

    async def drain(self, seconds: float) -> None:
        """Refuses new requests and waits for running ones, as in `Admission`. The fronts also count requests that are being handed
        over.
        """
        self.draining = True
        await asyncio.gather(*(front.drain(seconds) for front in self.fronts))

    def end_all(self) -> None:
        """Ends all requests on all copies with an error."""
        for front in self.fronts:
            front.end_all()

    # ---------------------------------------------------------------- requests

    @asynccontextmanager
    async def open(
        self,
        requests: Sequence[Request],
        prompts: Sequence[Sequence[int]] = (),
        names: Sequence[str] = (),
        adapter: str | None = None,
        *,
        goes_on: bool = False,
    ) -> AsyncIterator[EventStreams | RequestParts]:
        """Distributes requests over the copies. Arguments and errors are those of `Front.open`. With `goes_on`, all run on one copy."""
        self._check([*(len(r.tokens) for r in requests), *map(len, prompts)])
        shares = self._shares(requests, prompts, await self._hashes(requests), whole=goes_on)
        async with AsyncExitStack() as stack:
            news: Arrivals = asyncio.Queue()
            parts: list[EventStreams] = []
            scored: list[list[int]] = []
            for front, units in shares.items():
                places = sorted(place for unit in units for place in unit.places)
                scored.append(sorted(at for unit in units for at in unit.scored))
                mine = [requests[place] for place in places], [prompts[at] for at in scored[-1]]
                opened = front.open(*mine, names, adapter, StreamPart(places, news), goes_on=goes_on)
                parts.append(await stack.enter_async_context(opened))
            answers = parts[0] if len(parts) == 1 else RequestParts(parts, scored, news)
            self.opened.add(answers)
            try:
                yield answers
            finally:
                self._closed(answers)

    def _shares(
        self, requests: Sequence[Request], prompts: Sequence[Sequence[int]], hashes: Mapping[int, Sequence[bytes]], *, whole: bool
    ) -> dict[Front, list[RequestGroup]]:
        """Chooses a copy for each prompt. Returns the prompts of each copy.

        Args:
            hashes: the page hashes of each prompt, as `_hashes` returns them.
            whole: whether one copy gets all prompts.
        """
        # The requests for completions of one prompt, and for its log-probabilities, share the list object of its ids.
        units: dict[int, RequestGroup] = {}
        for place, request in enumerate(requests):
            units.setdefault(0 if whole else id(request.tokens), RequestGroup()).places.append(place)
        for at, ids in enumerate(prompts):
            units.setdefault(0 if whole else id(ids), RequestGroup()).scored.append(at)
        loads = [front.load for front in self.fronts]
        shares: dict[Front, list[RequestGroup]] = {}
        for unit in units.values():
            number = self._choose_copy(loads, hashes[id(requests[unit.places[0]].tokens)] if unit.places else ())
            loads[number] += unit.load
            shares.setdefault(self.fronts[number], []).append(unit)
        return shares

    async def _hashes(self, requests: Sequence[Request]) -> dict[int, list[bytes]]:
        """As `_page_hashes`, but in a thread if there are many tokens, because 50,000 would block the event loop for 12 ms."""
        if sum(len(tokens) for tokens in {id(request.tokens): request.tokens for request in requests}.values()) <= FEW_TOKENS:
            return self._page_hashes(requests)
        return await asyncio.get_running_loop().run_in_executor(None, self._page_hashes, requests)

    def _page_hashes(self, requests: Sequence[Request]) -> dict[int, list[bytes]]:
        """The page hashes of each prompt, by the `id` of its list of token ids."""
        page, prompts = self.engine.settings.page, {id(request.tokens): request for request in requests}
        # The last token of a prompt is computed in any case.
        return {key: page_hashes(request.tokens[:-1], page, self.engine.page_key(request)) for key, request in prompts.items()}

    def _choose_copy(self, loads: Sequence[int], hashes: Sequence[bytes]) -> int:
        """Chooses the copy for a prompt. Returns its index.

        Args:
            loads: the load of each copy.
            hashes: the page hashes of the prompt.
        """
        least, count = min(loads), len(loads)
        order = [(self._turn + i) % count for i in range(count)]
        near = [number for number in order if loads[number] <= least + SLACK]
        if hashes and len(near) > 1:
            near = self._with_longest_prefix(near, hashes)
        copy_number = min(near, key=loads.__getitem__)
        self._turn = (copy_number + 1) % count
        return copy_number

    def _with_longest_prefix(self, numbers: list[int], hashes: Sequence[bytes]) -> list[int]:
        """The copies among `numbers` whose prefix cache has the longest prefix of a prompt. The threads change the caches meanwhile,
        so the result may be outdated."""
        for page_hash in hashes:
            having = [number for number in numbers if self.fronts[number].engine.pages.has(page_hash)]
            if not having:
                break
            numbers = having
        return numbers

    def abort(self, names: Collection[str] | None = None) -> int:
        """Aborts requests on all copies, as `Front.abort`."""
        requests = [request for request in self.opened if names is None or not set(names).isdisjoint(request.names)]
        for request in requests:
            request.abort()
        return len(requests)

    # ---------------------------------------------------------------- all copies, or none

    async def together(self, work: Callable[[Sequence[Engine]], R]) -> R:
        """Calls `work` with the engines while no thread makes a step. Errors of `work` are passed on.

        Raises:
            ApiError: an engine has died.
        """

        async def all_parked() -> R:
            async with self._alone:
                released = threading.Event()
                parked = [front.park(released) for front in self.fronts]
                try:
                    await asyncio.gather(*map(asyncio.wrap_future, parked))
                    return await asyncio.get_running_loop().run_in_executor(None, work, self.engines)
                finally:
                    released.set()

        # `work` runs even if the caller is cancelled.
        return await asyncio.shield(asyncio.create_task(all_parked()))

    async def pause(self, mode: PauseMode) -> None:
        """Pauses all copies, as `Front.pause`."""
        if mode == "abort":
            self.abort()
        await asyncio.gather(*(front.pause("wait" if mode == "wait" else "keep") for front in self.fronts))

    async def resume(self) -> None:
        """Resumes all copies, as `Front.resume`."""
        await asyncio.gather(*(front.resume() for front in self.fronts))

    @property
    def paused(self) -> bool:
        return all(front.paused for front in self.fronts)
