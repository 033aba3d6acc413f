"""Turns the plan of a step into arrays, padded to the sizes that programs are compiled for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from argosy.infer.engine.prompt_inputs import rotary_positions
from argosy.infer.engine.scheduled import ScheduledRequest
from argosy.infer.engine.scheduler import PrefillChunk, StepPlan
from argosy.infer.forward.step import PageTables, StepSizes, empty_words, split_words
from argosy.infer.settings import ROW, EngineSettings
from argosy.parallel.scope import platform


class StepBatch(NamedTuple):
    """A step as arrays.

    sizes: the sizes that the program is compiled for.
    words: the arrays of all rows in one int32 array, which `step.split_words` splits.
    due: the requests for which a token is sampled.
    picks: index, among the tokens of the step, of the last token of each request in `due`. With drafts: the indices of the last known
        tokens, then those of the first drafts, and so on.
    owners: the slot of each request in `due`, padded with -1 to the length that the sampler is compiled for.
    drafts: the draft tokens, as `speculate.verify` takes them; None without drafts.
    counts: number of tokens that this step samples for each request; empty if one for each.
    embeddings: embeddings [1 T D] for prompt tokens whose embeddings are replaced; None: there are none.
    """

    sizes: StepSizes
    words: np.ndarray
    due: list[ScheduledRequest]
    picks: np.ndarray
    owners: np.ndarray
    drafts: np.ndarray | None = None
    counts: Sequence[int] = ()
    embeddings: np.ndarray | None = None


@dataclass(frozen=True)
class BatchBuilder:
    """Fills the arrays of steps.

    settings: the engine's settings.
    tables: the sizes of the page tables of a row.
    shares: whether several rows of one step may belong to one request.
    width: the model's embedding width.
    text: whether inputs other than token ids are ignored.
    """

    settings: EngineSettings
    tables: PageTables
    shares: bool
    width: int
    text: bool = False

    def build(self, plan: StepPlan) -> StepBatch:
        """Turns a plan into arrays. A decoding row computes one token, the one sampled last, which stays on the device."""
        sizes, words, prompts, embeddings = self._with_prompts(plan, 1)
        d, _, _ = split_words(words, sizes)
        for i, request in enumerate(plan.decodes):
            count = plan.counts[i] if plan.counts else 1
            d["slot"][i], d["length"][i] = request.slot, request.computed - count
            self.write_pages(d, i, request)
            _write_rotary(d, i, request, 1)
            if plan.counts:
                d["steps"][i] = count
        due = [*plan.decodes, *(request for request, _ in prompts)]
        places = [*range(len(plan.decodes)), *(place for _, place in prompts)]
        count = sampler_rows(len(due))
        picks, owners = np.zeros(count, np.int32), np.full(count, -1, np.int32)
        picks[: len(due)], owners[: len(due)] = places, [request.slot for request in due]
        return StepBatch(sizes, words, due, picks, owners, counts=plan.counts, embeddings=embeddings)

    def build_drafted(
        self,
        plan: StepPlan,
        starts: Sequence[int],
        rows: Sequence[Sequence[int]],
        drafts: Sequence[Sequence[int]],
        draft_width: int,
    ) -> StepBatch:
        """Turns a plan into arrays, where each decoding request computes several tokens.

        Args:
            starts: number of tokens of each decoding request that are computed already.
            rows: the tokens that this step computes for each decoding request, drafts included.
            drafts: the drafts of each decoding request, which are the last tokens of its row.
            draft_width: number of tokens in a decoding row of the compiled program.
        """
        sizes, words, prompts, embeddings = self._with_prompts(plan, draft_width)
        _, r, _ = split_words(words, sizes)
        due = [*plan.decodes, *(request for request, _ in prompts)]
        count, deepest = sampler_rows(len(due)), draft_width - 1
        picks, owners = np.zeros((draft_width, count), np.int32), np.full(count, -1, np.int32)
        guesses = np.full((deepest, count), -1, np.int32)
        for i, (request, start, tokens, drafted) in enumerate(zip(plan.decodes, starts, rows, drafts, strict=True)):
            r["slot"][i], r["length"][i], r["new"][i] = request.slot, start, len(tokens)
            self.write_pages(r, i, request)
            r["tokens"][i, : len(tokens)] = tokens
            _write_rotary(r, i, request, len(tokens))
            picks[:, i] = i * draft_width + len(tokens) - 1
            picks[: len(drafted), i] -= np.arange(len(drafted), 0, -1)
            guesses[: len(drafted), i] = drafted
        picks[:, len(plan.decodes) : len(due)] = [place for _, place in prompts]
        owners[: len(due)] = [request.slot for request in due]
        return StepBatch(sizes, words, due, picks.reshape(-1), owners, guesses, embeddings=embeddings)

    def _with_prompts(
        self, plan: StepPlan, draft_width: int
    ) -> tuple[StepSizes, np.ndarray, list[tuple[ScheduledRequest, int]], np.ndarray | None]:
        """Fills the rows of prompts. Returns the sizes; the words; each request whose prompt ends in this step, with the index of its
        last token among the step's tokens; and the embeddings."""
        rows = self._rows(plan)
        longest = max((len(chunk.tokens) for chunk in plan.chunks), default=0)
        width = ROW * (1 if self.shares else next_power(-(-longest // ROW), 4))
        decodes = self._decoding_rows(len(plan.decodes), alone=not rows)
        sizes = _sizes(decodes, _prompt_rows(len(rows), decodes), width if rows else 0, self.tables, draft_width)
        sizes = sizes._replace(steps=self.settings.steps) if plan.counts else sizes
        sizes = sizes if self.text else sizes._replace(**_input_sizes(plan))
        words = empty_words(sizes)
        c, ended = split_words(words, sizes)[2], []
        embeddings = np.zeros((1, sizes.rows, width, self.width), np.float32) if sizes.overlay else None
        for i, (chunk, at) in enumerate(rows):
            tokens, request = chunk.tokens[at : at + width], chunk.request
            c["slot"][i], c["length"][i], c["new"][i] = request.slot, chunk.start + at, len(tokens)
            self.write_pages(c, i, request)
            c["tokens"][i, : len(tokens)] = tokens
            _write_rotary(c, i, request, len(tokens))
            if embeddings is not None and request.inputs is not None and request.inputs.embeddings is not None:
                embedding_rows = request.inputs.rows(chunk.start + at, chunk.start + at + len(tokens))
                places = request.inputs.places[embedding_rows] - chunk.start - at
                c["overlay"][i, places], embeddings[0, i, places] = 1, request.inputs.embeddings[embedding_rows]
            if chunk.ends and at + len(tokens) == len(chunk.tokens):
                ended.append((request, decodes * draft_width + i * width + len(tokens) - 1))
        return sizes, words, ended, None if embeddings is None else embeddings.reshape(1, -1, self.width)

    def write_pages(self, part: dict[str, np.ndarray], i: int, request: ScheduledRequest) -> None:
        """Writes the page tables of row i in place. The row's length must be written before. The table of a sliding window gets only
        the pages that the row attends to."""
        part["table"][i, : len(request.pages)] = request.pages
        for number, (window, window_pages) in enumerate(zip(self.tables.windows, request.windows)):
            first = window.first(int(part["length"][i])) // self.tables.page
            table = part[f"window{number}"][i]
            assert first >= window_pages.first, "pages that the row sees were given back"
            visible = window_pages.pages[first - window_pages.first :][: len(table)]
            part[f"first{number}"][i], table[: len(visible)] = first, visible

    def decode_sizes(self, rows: int) -> StepSizes:
        """The sizes of a step with `rows` decoding rows and no prompt."""
        return StepSizes(self._decoding_rows(rows, alone=True), 0, 0, self.tables)

    def prompt_sizes(self, tokens: int) -> StepSizes:
        """The sizes of a step that computes `tokens` tokens of one prompt and nothing else."""
        rows = -(-tokens // ROW)
        if self.shares:
            return StepSizes(0, _prompt_rows(rows, 0), ROW, self.tables)
        return StepSizes(0, 1, ROW * next_power(rows, 4), self.tables)

    def all_batches(self, draft_width: int = 1) -> Iterator[StepBatch]:
        """Yields an empty batch for every combination of sizes that a step may have, for warm-up.

        Args:
            draft_width: as in `possible_sizes`.
        """
        for sizes, counts in self.possible_sizes(draft_width).items():
            words = empty_words(sizes)
            for count in sorted(counts):
                drafts = None if draft_width == 1 else np.full((draft_width - 1, count), -1, np.int32)
                picks, owners = np.zeros(draft_width * count, np.int32), np.full(count, -1, np.int32)
                yield StepBatch(sizes, words, [], picks, owners, drafts)

    def possible_sizes(self, draft_width: int = 1) -> dict[StepSizes, set[int]]:
        """All sizes that a step may have, each with the numbers of rows that the sampler may be called with.

        Args:
            draft_width: number of tokens in a decoding row. Above 1: the steps of `build_drafted`, which have decoding rows.
        """
        slots, tables = self.settings.slots, self.tables
        possible: dict[StepSizes, set[int]] = {}
        for n in range(1, slots + 1):
            sizes = _sizes(self._decoding_rows(n, alone=True), 0, 0, tables, draft_width)
            possible.setdefault(sizes, set()).add(sampler_rows(n))
            if self.settings.steps > 1:
                possible.setdefault(sizes._replace(steps=self.settings.steps), set()).add(sampler_rows(n))
        for n in range(int(draft_width > 1), slots):
            decodes = self._decoding_rows(n, alone=False)
            budget = self.settings.budget_decoding if n else self.settings.budget
            widths = {ROW} if self.shares else {ROW * next_power(k, 4) for k in range(1, -(-budget // ROW) + 1)}
            for rows in range(1, (budget // ROW if self.shares else 1) + 1):
                for width in widths:
                    sizes = _sizes(decodes, _prompt_rows(rows, decodes), width, tables, draft_width)
                    ended = range(min(rows, slots - n) + 1)
                    possible.setdefault(sizes, set()).update(sampler_rows(n + k) for k in ended)
        return possible

    def _rows(self, plan: StepPlan) -> list[tuple[PrefillChunk, int]]:
        """The rows of the prompts: for each row its chunk, and the index in the chunk of the row's first token."""
        if not self.shares:
            return [(chunk, 0) for chunk in plan.chunks]
        return [(chunk, at) for chunk in plan.chunks for at in range(0, len(chunk.tokens), ROW)]

    def _decoding_rows(self, n: int, *, alone: bool) -> int:
        """The number of decoding rows that a step with `n` of them is compiled for.

        Without prompts it is 1, 4, 8, 16 and so on. With prompts, where more rows cost little, it is 8 or all slots. On GPUs and TPUs
        it is at least 4. For a single row, XLA for GPUs writes the product of each weight and the row to memory before the sum, and XLA
        for TPUs leaves the matrix units idle (20 ms a step instead of 14, Llama 3.1 8B on a v5p, by its compiler's estimate)."""
        if n == 0:
            return 0
        if alone:
            fewest = 1 if n != 2 and platform() == "cpu" else 4
            return max(fewest, next_power(n, 2))
        most = next_power(self.settings.slots, 2)
        return min(8, most) if n <= 8 else most


def _input_sizes(plan: StepPlan) -> dict[str, Any]:
    """The fields `axes` and `overlay` of `StepSizes`, by the inputs that a plan's requests have besides token ids; empty without
    any."""
    inputs = [request.inputs for request in plan.decodes] + [chunk.request.inputs for chunk in plan.chunks]
    if not any(inputs):
        return {}
    chunks = [(chunk.request.inputs, chunk.start, chunk.start + len(chunk.tokens)) for chunk in plan.chunks]
    overlay = any(prompt_inputs is not None and prompt_inputs.overlays(start, end) for prompt_inputs, start, end in chunks)
    return {"axes": max(0 if prompt_inputs is None else prompt_inputs.axes for prompt_inputs in inputs), "overlay": overlay}


def _write_rotary(part: dict[str, np.ndarray], i: int, request: ScheduledRequest, count: int) -> None:
    """Writes the rotary positions of the first `count` tokens of row i in place, if the step has an array for them. The row's length
    must be written before."""
    if "rotary" in part:
        start = int(part["length"][i])
        part["rotary"][i, :count] = rotary_positions(request.inputs, start, start + count, part["rotary"].shape[2])


def _sizes(decodes: int, rows: int, width: int, tables: PageTables, draft_width: int) -> StepSizes:
    if draft_width == 1:
        return StepSizes(decodes, rows, width, tables)
    return StepSizes(0, rows, width, tables, decodes, draft_width)


def _prompt_rows(n: int, decodes: int) -> int:
    """The number of prompt rows that a step with `n` of them is compiled for.

    Without decoding rows it is 1, 2, 4 and so on, because empty rows cost as much as full ones. With decoding rows it is 1, 4, 16,
    because each of these is compiled for several numbers of decoding rows."""
    return next_power(n, 4 if decodes else 2)


def sampler_rows(n: int) -> int:
    """The number of rows that the sampler is compiled for, if it samples `n`: 1, 8, 32, 64 and so on. Each compilation takes 3 s on a
    CPU."""
    return 1 if n <= 1 else 8 if n <= 8 else max(32, next_power(n, 2))


def next_power(n: int, base: int) -> int:
    """The smallest power of `base` that is at least `n`; 0 for 0."""
    size = min(n, 1)
    while size < n:
        size *= base
    return size
