"""Packing against brute force: every token looked up one by one, and textbook best fit."""

import numpy as np
import pytest

from argosy.data.pack import Corpus, Encoded, FitRows, SplitRows, best_fit_decreasing, corpus_of


def corpus(draw: np.random.Generator, documents: int, longest: int, learn: bool = False) -> Corpus:
    sizes = draw.integers(1, longest + 1, documents)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    tokens = draw.permutation(int(starts[-1])).astype(np.uint16)  # all different, so that a target tells its place
    return Corpus(tokens, starts, draw.integers(0, 2, len(tokens)).astype(np.uint8) if learn else None)


def document_of(corpus: Corpus) -> list[int]:
    return [d for d in range(corpus.documents) for _ in range(corpus.starts[d], corpus.starts[d + 1])]


def split_by_hand(corpus: Corpus, sequence: int, row: int) -> dict[str, list]:
    """One row of the stream, token by token."""
    arrays = {name: [] for name in ("tokens", "targets", "segments", "mask")}
    documents, n, segment = document_of(corpus), len(corpus.tokens), 1
    for at in range(row * sequence, (row + 1) * sequence):
        if at >= n:
            values = (0, 0, 0, 0)
        else:
            if at > row * sequence and documents[at] != documents[at - 1]:
                segment += 1
            follows = at + 1 < n
            same = follows and documents[at + 1] == documents[at]
            counts = same and (corpus.weights is None or corpus.weights[at + 1])
            target = corpus.tokens[at + 1] if follows else 0
            values = (corpus.tokens[at], target, segment, float(counts))
        for name, value in zip(arrays, values):
            arrays[name].append(value)
    return arrays


@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize("documents, longest, sequence", [(1, 50, 8), (40, 9, 16), (7, 60, 16), (30, 1, 4), (5, 3, 64)])
def test_split_rows_are_those_cut_by_hand(documents, longest, sequence, learn):
    random_corpus = corpus(np.random.default_rng(documents), documents, longest, learn)
    rows = SplitRows(random_corpus, sequence)
    order = np.random.default_rng(0).permutation(len(rows))
    batch = rows.gather(order)
    for at, row in enumerate(order):
        for name, expected in split_by_hand(random_corpus, sequence, int(row)).items():
            np.testing.assert_array_equal(batch[name][at], expected, err_msg=f"{name} of row {row}")
    assert [batch[name].dtype for name in batch] == [np.int32] * 3 + [np.float32]


@pytest.mark.parametrize("kind", [SplitRows, FitRows])
def test_every_target_is_learned_once(kind):
    random_corpus = corpus(np.random.default_rng(3), 60, 40)
    batch = kind(random_corpus, 16).gather(np.arange(len(kind(random_corpus, 16))))
    learned = batch["targets"][batch["mask"] > 0]
    firsts = random_corpus.tokens[random_corpus.starts[:-1]]
    assert sorted(learned) == sorted(set(random_corpus.tokens.tolist()) - set(firsts.tolist()))


@pytest.mark.parametrize("kind", [SplitRows, FitRows])
def test_the_token_before_a_learned_target_is_its_own(kind):
    random_corpus = corpus(np.random.default_rng(4), 30, 50)
    before = dict(zip(random_corpus.tokens[1:].tolist(), random_corpus.tokens[:-1].tolist()))
    batch = kind(random_corpus, 16).gather(np.arange(len(kind(random_corpus, 16))))
    learned = batch["mask"] > 0
    assert [before[t] for t in batch["targets"][learned].tolist()] == batch["tokens"][learned].tolist()


@pytest.mark.parametrize("learn", [False, True])
def test_fit_rows_hold_whole_documents(learn):
    random_corpus = corpus(np.random.default_rng(5), 80, 17, learn)  # 17 tokens are 16 inputs with their targets
    rows = FitRows(random_corpus, 16)
    batch = rows.gather(np.arange(len(rows)))
    weight = np.ones(len(random_corpus.tokens)) if random_corpus.weights is None else random_corpus.weights
    rows_by_start = {}
    for row in range(len(rows)):
        for segment in range(1, batch["segments"][row].max() + 1):
            here = batch["segments"][row] == segment
            rows_by_start[int(batch["tokens"][row][here][0])] = {name: batch[name][row][here].tolist() for name in batch}
    for start, stop in zip(random_corpus.starts, random_corpus.starts[1:]):
        if stop - start > 1:
            got = rows_by_start.pop(int(random_corpus.tokens[start]))
            assert got["tokens"] == random_corpus.tokens[start : stop - 1].tolist()
            assert got["targets"] == random_corpus.tokens[start + 1 : stop].tolist()
            assert got["mask"] == weight[start + 1 : stop].tolist()
    assert not rows_by_start
    padding = batch["segments"] == 0
    assert not any(batch[name][padding].any() for name in batch)


@pytest.mark.parametrize("too_long", ["cut", "drop"])
@pytest.mark.parametrize("seed", range(4))
def test_documents_without_a_target_that_counts_are_left_out(seed, too_long):
    random_corpus = corpus(np.random.default_rng(seed), 80, 25, learn=True)
    rows = FitRows(random_corpus, 16, too_long)
    expected, unlearned, cut = [], 0, 0
    for start, stop in zip(random_corpus.starts.tolist(), random_corpus.starts[1:].tolist()):
        end = min(stop, start + 17)
        if end - start < 2 or (too_long == "drop" and end < stop):
            continue
        learns = random_corpus.weights[start + 1 : end].sum()
        unlearned += not learns
        if learns:
            expected.append((start, end - start - 1, learns))
            cut += end < stop
    assert (rows.unlearned, rows.cut) == (unlearned, cut)
    assert unlearned > 0
    assert rows.begin.tolist() == [start for start, _, _ in expected]
    assert rows.size.tolist() == [size for _, size, _ in expected]
    assert rows.learned(rows.begin, rows.size).tolist() == [learns for _, _, learns in expected]


def textbook(sizes: list[int], capacity: int) -> list[int]:
    """Best fit decreasing with a plain search over all bins; the number of bins' contents is what must agree."""
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [(room, i) for i, room in enumerate(rooms) if room >= size]
        if fitting:
            rooms[min(fitting)[1]] -= size
        else:
            rooms.append(capacity - size)
    return sorted(rooms)


@pytest.mark.parametrize("seed", range(5))
def test_best_fit_agrees_with_the_textbook(seed):
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 65, 300)
    bins = best_fit_decreasing(sizes, 64)
    filled = np.bincount(bins, weights=sizes)
    assert filled.max() <= 64
    assert sorted((64 - filled).astype(int)) == textbook(sizes.tolist(), 64)
    assert len(filled) <= np.ceil(sizes.sum() / 64) * 11 / 9 + 1  # Johnson (1973): 11/9 of the best, and a little


def test_an_empty_corpus_has_no_rows():
    for kind in (SplitRows, FitRows):
        assert len(kind(corpus_of([]), 8)) == 0
        assert len(kind(corpus_of([Encoded(np.array([7], np.uint16))]), 8)) == 0


def test_pieces_join_to_one_document():
    a, b, c = (np.arange(i, i + 3, dtype=np.uint16) for i in (0, 10, 20))
    joined = corpus_of([Encoded(a), Encoded(b, begins=False), Encoded(c, np.array([0, 1, 1], np.uint8))])
    assert joined.starts.tolist() == [0, 6, 9]
    assert joined.tokens.tolist() == [0, 1, 2, 10, 11, 12, 20, 21, 22]
    assert joined.weights is not None
    assert joined.weights.tolist() == [1] * 6 + [0, 1, 1]
    assert corpus_of([Encoded(a, begins=False)]).starts.tolist() == [0, 3]
