"""A request as the scheduler sees it: its tokens and its KV-cache pages. No jax."""

from dataclasses import dataclass, field

from argosy.infer.engine.pages import NO_KEY, PageHash, PageKey, page_hashes, tail_hash
from argosy.infer.engine.prompt_inputs import PromptInputs


@dataclass(eq=False)
class WindowPages:
    """The pages that a sequence has in the pool of a sliding window.

    first: the page number, counted from the beginning of the sequence, of the first page that it still has.
    pages: its pages from there on.
    """

    first: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.first + len(self.pages)


@dataclass(eq=False)
class ScheduledRequest:
    """One prompt and its completion. The scheduler changes it in place.

    tokens: the token ids of prompt and completion that the host knows.
    max_tokens: the most tokens of the completion.
    prompt: number of prompt tokens; 0: all of `tokens`.
    id: the engine's id of the request.
    priority: requests with a lower number run first.
    key: the prefix-cache key: what its pages depend on besides token ids.
    inputs: the prompt's inputs besides token ids.
    stepwise: whether the host must see each token before the next is sampled.
    order: its number in the order of arrival.
    computed: number of tokens whose keys and values dispatched steps wrote into the cache.
    pending: number of tokens that dispatched steps sample and the host has not read yet.
    recompute: number of tokens besides the last that the next decode step computes again, because recurrent states were rolled back.
    slot: its row in the sampler's state and in the caches of recurrent layers; -1 while it waits.
    pages: its pages, in the order of its tokens.
    windows: its pages in the pool of each sliding window.
    published: number of its pages that are registered for prefix caching.
    reused: number of prompt tokens found in the prefix cache.
    copied: whether all but the last token of the prompt was found in the prefix cache.
    preemptions: how many times it was preempted.
    done: whether it has ended.
    """

    tokens: list[int]
    max_tokens: int
    prompt: int = 0
    id: int = -1
    priority: int = 0
    key: PageKey = NO_KEY
    inputs: PromptInputs | None = None
    stepwise: bool = False
    order: int = 0
    computed: int = 0
    pending: int = 0
    recompute: int = 0
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    windows: list[WindowPages] = field(default_factory=list)
    published: int = 0
    reused: int = 0
    copied: bool = False
    preemptions: int = 0
    done: bool = False

    def __post_init__(self) -> None:
        self.prompt = self.prompt or len(self.tokens)
        self._hashes: list[PageHash] = []
        self._tail: tuple[int, PageHash] | None = None

    @property
    def completion(self) -> list[int]:
        """The known tokens of the completion."""
        return self.tokens[self.prompt :]

    @property
    def length(self) -> int:
        """Number of tokens of prompt and completion, including those still being sampled."""
        return len(self.tokens) + self.pending

    @property
    def completion_length(self) -> int:
        """Number of tokens of the completion, including those still being sampled."""
        return self.length - self.prompt

    @property
    def is_prefilling(self) -> bool:
        """Whether it is still being prefilled, for the first time or after a preemption, and does not decode yet."""
        return self.computed + self.recompute < self.length - 1 or (self.completion_length == 0 and not self.copied)

    @property
    def ends_in_overlay(self) -> bool:
        """Whether the embedding of its last known token is replaced. Decoding rows cannot do that."""
        last = len(self.tokens) - 1
        return self.inputs is not None and self.inputs.overlays(last, last + 1)

    @property
    def next_position(self) -> int:
        """The position of the first token that its next decode step computes."""
        return self.length - 1 - self.recompute

    def hashes(self, page: int) -> list[PageHash]:
        """The hashes of its pages that known tokens fill. `page` is the number of tokens per page."""
        count = len(self._hashes)
        if len(self.tokens) // page > count:
            first = self._hashes[-1] if count else None
            self._hashes += page_hashes(self.tokens[count * page :], page, self.key, first, count * page)
        return self._hashes

    def tail(self, page: int) -> PageHash | None:
        """The hash (`tail_hash`) of all its known tokens but the last; None if these fill whole pages."""
        length = len(self.tokens) - 1
        if length % page == 0:
            return None
        if self._tail is None or self._tail[0] != length:
            self._tail = length, tail_hash(self.tokens[:length], page, self.key, self.hashes(page)[: length // page])
        return self._tail[1]
