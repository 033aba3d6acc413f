"""Packs prompts with their completions into micro-batches of one shape, called parts. A device computes one part at a time.

A part has R rows of T tokens, and S places for completions. Prompts with their completions are packed into rows by best fit, and rows
into parts in that order. A part is closed when its rows or its places are full. The lengths of completions change only the number of
parts, so one compiled program serves all of them, and little is computed for padding. See `rl.policy.objective` for the arrays.

With `PartShape.shared`, completions of one prompt that are in the same row follow a single copy of the prompt (Liu et al. 2025,
arXiv:2506.05433). The prompt's last token is repeated before each completion, because its target is that completion's first token.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.data.batch import Batch
from argosy.data.pack import best_fit_decreasing
from argosy.rl.rollouts.completions import Trajectory

# Answers that a part has places for, as a multiple of those of full length.
SHORTER = 8


@dataclass(frozen=True)
class PartShape:
    """The shape of a part (micro-batch) of a rollout.

    rows: the number of rows.
    sequence: the number of tokens in a row.
    longest: the largest length of a completion in tokens.
    teacher_sequence: the number of tokens in a row of a teacher that has another tokenizer; 0 without such a teacher.
    shared: whether completions of the same prompt share one copy of it.
    """

    rows: int
    sequence: int
    longest: int
    teacher_sequence: int = 0
    shared: bool = False

    @property
    def answers(self) -> int:
        return self.rows * max(1, self.sequence // self.longest) * SHORTER

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the axes that belong to one field, by letter."""
        return {"S": self.answers, "L": self.longest} | ({"U": self.teacher_sequence} if self.teacher_sequence else {})


@dataclass(frozen=True)
class RolloutBatch:
    """The batch of one update.

    parts: the packed micro-batches, whose gradients are summed.
    numbers: metrics of the rollout, which are logged with the update.
    """

    parts: Sequence[Batch]
    numbers: dict[str, float]


@dataclass(frozen=True)
class PackedPart:
    """A micro-batch of packed completions, still without advantages.

    rows: the arrays of the rows.
    owners: [S], the index of the completion in each place; -1 for an empty place.
    """

    rows: Batch
    owners: np.ndarray

    def filled(self, columns: Mapping[str, np.ndarray]) -> Batch:
        """Returns the part with further arrays of one number per token, [S L] each.

        Args:
            columns: the arrays over all B completions [B L], by name.
        """
        there = (self.owners >= 0)[:, None]
        filled_columns = {name: np.where(there, values[self.owners], np.zeros((), values.dtype)) for name, values in columns.items()}
        return {**self.rows, **filled_columns}

    def spread(self, values: np.ndarray, out: np.ndarray) -> None:
        """Scatters values of this part's places to their completions.

        Args:
            values: [S ...], the value of each place.
            out: [B ...], the value of each completion, which is changed in place.
        """
        there = self.owners >= 0
        out[self.owners[there]] = values[there]


def per_token(answers: Sequence[Trajectory], longest: int, label: str) -> np.ndarray:
    """Makes an array [B L] of a field of completions that has one value per token. It is 0 after the end of each completion.

    Args:
        longest: L, the largest length of a completion in tokens.
        label: the name of the field, `live` or `logprobs`.

    Raises:
        BadInput: a completion is longer than `longest`.
    """
    out = np.zeros((len(answers), longest), np.float32)
    for row, answer in enumerate(answers):
        values = getattr(answer, label)
        if len(values) > longest:
            raise BadInput(f"an answer of {plural(len(values), 'token')}", where=f"rollout.tokens = {longest}")
        out[row, : len(values)] = values
    return out


def pack_trajectories(
    answers: Sequence[Trajectory], numbers: Sequence[int], shape: PartShape, room: np.ndarray | None = None
) -> list[PackedPart]:
    """Packs some of the completions into parts.

    Args:
        answers: all completions.
        numbers: the indices of the completions to pack.
        room: [B], the number of tokens that each completion occupies in a row, at least those of the completion and its prompt. None:
            exactly these.

    Raises:
        BadInput: a prompt with its completion is longer than a row.
    """
    sizes = np.array([len(answers[i].prompt.tokens) + len(answers[i].tokens) for i in numbers], np.int64)
    if sizes.max(initial=0) > shape.sequence:
        raise BadInput(f"a prompt and its answer have {sizes.max()} tokens", where=f"data.sequence = {shape.sequence}")
    if room is not None:
        sizes = np.minimum(room[list(numbers)], shape.sequence)
    ways = [best_fit_bins(sizes, shape.sequence)]
    if shape.shared:
        prompt_tokens = [tuple(answers[i].prompt.tokens) for i in numbers]
        lengths = np.array([len(answers[i].tokens) for i in numbers], np.int64)
        # Whole groups waste what is left of a row, other ways repeat prompts: which one needs fewer parts depends on the lengths.
        alone = [sorted(row, key=lambda i: prompt_tokens[i]) for row in ways[0]]
        ways = [rows_of_groups(prompt_tokens, lengths, shape.sequence), rows_in_order(prompt_tokens, lengths, shape.sequence), alone]
    rows = min(([[numbers[i] for i in row] for row in way] for way in ways), key=lambda rows: len(list(rows_by_part(rows, shape))))
    return [packed_part(answers, shape, part) for part in rows_by_part(rows, shape)]


def best_fit_bins(sizes: np.ndarray, room: int) -> list[list[int]]:
    """Packs items into bins by best fit. Returns the indices of the items of each bin.

    Args:
        room: the capacity of a bin.
    """
    bin_of = best_fit_decreasing(sizes, room)
    bins: list[list[int]] = [[] for _ in range(int(bin_of.max(initial=-1)) + 1)]
    for item, number in enumerate(bin_of.tolist()):
        bins[number].append(item)
    return bins


Prompts = Sequence[tuple[int, ...]]


def rows_of_groups(prompts: Prompts, lengths: np.ndarray, room: int) -> list[list[int]]:
    """Packs completions that share prompts into rows by best fit. Returns the indices of the completions of each row.

    Completions of one prompt are first divided into groups, each of as many completions as fit into a row beside the prompt. Then
    groups are packed into rows.

    Args:
        prompts: the prompt of each completion.
        lengths: the number of tokens of each completion.
        room: the number of tokens in a row.
    """
    families, sizes = list[list[int]](), list[int]()
    for prompt, members in by_prompt(prompts).items():
        # Each with the prompt's last token, after the others.
        for row in best_fit_bins(lengths[members] + 1, room - len(prompt) + 1):
            families.append([members[i] for i in row])
            sizes.append(len(prompt) - 1 + int(sum(lengths[i] + 1 for i in families[-1])))
    return [[i for family in row for i in families[family]] for row in best_fit_bins(np.array(sizes, np.int64), room)]


def rows_in_order(prompts: Prompts, lengths: np.ndarray, room: int) -> list[list[int]]:
    """Fills rows in order with completions that share prompts. Returns the indices of the completions of each row. Completions of a
    prompt that do not fit continue in the next row, with another copy of the prompt. The arguments are those of `rows_of_groups`.
    """
    rows, remaining = list[list[int]](), 0
    for prompt, members in by_prompt(prompts).items():
        begun = False
        for i in sorted(members, key=lambda i: -lengths[i]):
            size = int(lengths[i]) + 1 + (0 if begun else len(prompt) - 1)
            if size > remaining:
                rows.append([])
                size, remaining = int(lengths[i]) + len(prompt), room
            rows[-1].append(i)
            remaining, begun = remaining - size, True
    return rows


def by_prompt(prompts: Prompts) -> dict[tuple[int, ...], list[int]]:
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(i)
    return groups


def rows_by_part(rows: Sequence[list[int]], shape: PartShape) -> Iterator[list[list[int]]]:
    """Groups rows into parts. Yields, for each part, the indices of the completions of each of its rows."""
    part: list[list[int]] = []
    count = 0
    for row in rows:
        begin = 0
        while begin < len(row):
            if len(part) == shape.rows or count == shape.answers:
                yield part
                part, count = [], 0
            # A row of very short answers may have more of them than there are places left: the rest is a row of the next part.
            piece = row[begin : begin + shape.answers - count]
            part, count, begin = [*part, piece], count + len(piece), begin + len(piece)
    if part:
        yield part


def packed_part(answers: Sequence[Trajectory], shape: PartShape, rows: list[list[int]]) -> PackedPart:
    """Packs one part.

    The last token of a completion is also an input, without a target. With `PartShape.shared`, neighboring completions of a row share
    one copy of their prompt if it is the same.

    Args:
        rows: the indices of the completions of each row.
    """
    tokens, targets, segments, prefixes, positions = np.zeros((5, shape.rows, shape.sequence), np.int32)
    places, ends = np.zeros((shape.answers, shape.longest), np.int32), np.zeros(shape.answers, np.int32)
    owners = np.full(shape.answers, -1, np.int32)
    slot = 0
    for row, members in enumerate(rows):
        at = segment = 0

        def put(ids: Sequence[int], prefix: int = 0, position: int = 0, row: int = row) -> None:
            """Writes the next segment of the row."""
            nonlocal at, segment
            segment, here = segment + 1, slice(at, at + len(ids))
            tokens[row, here], segments[row, here], prefixes[row, here] = ids, segment, prefix
            targets[row, at : at + len(ids) - 1] = ids[1:]
            positions[row, here] = position + np.arange(len(ids))
            at += len(ids)

        for family in prompt_families([answers[number].prompt.tokens for number in members], shape.shared):
            prompt = answers[members[family[0]]].prompt.tokens
            # A prompt of one token is repeated whole.
            shared = len(prompt) - 1 if len(family) > 1 else 0
            if shared:
                put(prompt[:-1])
            prefix = segment if shared else 0
            for i in family:
                answer, length = answers[members[i]], len(answers[members[i]].tokens)
                # The target of the prompt's last token is the first of the answer.
                begin = row * shape.sequence + at + len(prompt) - shared - 1
                places[slot, :length], ends[slot] = begin + np.arange(length), begin + length
                owners[slot] = members[i]
                put([*prompt[shared:], *answer.tokens], prefix, shared)
                slot += 1
    columns = {"tokens": tokens, "targets": targets, "segments": segments, "places": places, "ends": ends}
    return PackedPart(columns | ({"prefixes": prefixes, "positions": positions} if shape.shared else {}), owners)


def prompt_families(prompts: Sequence[Sequence[int]], shared: bool) -> list[list[int]]:
    """Groups the indices of neighboring completions that have the same prompt. Each index stays alone where prompts are not shared.

    Args:
        prompts: the prompt of each completion.
        shared: whether completions share prompts.
    """
    families: list[list[int]] = []
    for i, prompt in enumerate(prompts):
        if shared and i and list(prompt) == list(prompts[i - 1]):
            families[-1].append(i)
        else:
            families.append([i])
    return families


def density(parts: Sequence[Batch]) -> float:
    """Returns the share of the tokens of parts that are not padding."""
    return float(np.mean([np.mean(part["segments"] > 0) for part in parts])) if parts else 0.0


def shared_share(parts: Sequence[PackedPart], answers: Sequence[Trajectory]) -> float:
    """Returns the share of prompt and completion tokens that is saved because completions share prompts."""
    alone = sum(len(answers[i].prompt.tokens) + len(answers[i].tokens) for part in parts for i in part.owners.tolist() if i >= 0)
    return 1 - sum(int(np.sum(part.rows["segments"] > 0)) for part in parts) / alone if alone else 0.0


def stored_batches(experiences: Sequence[RolloutBatch]) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
    """Converts batches to arrays by name, and their other data to JSON. Micro-batches that several batches share, as those of several
    epochs do, are stored once."""
    numbers: dict[int, int] = {}
    arrays: dict[str, np.ndarray] = {}
    for batch in experiences:
        if id(batch.parts) not in numbers and batch.parts:
            numbers[id(batch.parts)] = len(numbers)
            arrays |= {f"{numbers[id(batch.parts)]}.{name}": np.stack([part[name] for part in batch.parts]) for name in batch.parts[0]}
    return arrays, [{"numbers": batch.numbers, "parts": numbers.get(id(batch.parts))} for batch in experiences]


def restored_batches(arrays: dict[str, np.ndarray], described: Sequence[dict[str, Any]]) -> list[RolloutBatch]:
    """The inverse of `stored_batches`."""
    parts: dict[int | None, list[Batch]] = {None: []}
    for number in sorted({int(name.partition(".")[0]) for name in arrays}):
        columns = {name.partition(".")[2]: np.asarray(a) for name, a in arrays.items() if name.startswith(f"{number}.")}
        parts[number] = [{name: a[i] for name, a in columns.items()} for i in range(len(next(iter(columns.values()))))]
    return [RolloutBatch(parts[description["parts"]], dict(description["numbers"])) for description in described]
