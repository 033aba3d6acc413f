"""Fields, groups and columns: a batch holds what was asked for, and rows that belong together stay together."""

from itertools import islice

import numpy as np
import pytest
from test_prepare import Bytes

from argosy.core.errors import BadInput
from argosy.data.batch import LANGUAGE_MODELING, Batch, Batches, Field
from argosy.data.pack import Corpus, Encoded, corpus_of
from argosy.data.pipeline import build, eval_batches
from argosy.data.rows.groups import Example, ExampleGroup, Examples, GroupRows
from argosy.data.settings import DataSettings
from argosy.data.sources import Document
from argosy.data.sources.text import TextsInMemory

PAIR = {
    **LANGUAGE_MODELING,
    "advantages": Field("B T", np.float32),
    "reward": Field("B", np.float32, "row"),
    "margin": Field("B", np.float32, "group"),
    "image": Field("B H W", np.float32, "group"),
}


def settings(tmp_path, **values) -> DataSettings:
    return DataSettings(**{"sequence": 8, "batch": 4, "cache": str(tmp_path), "held_out": 0.0} | values)


def pairs(count: int, size: int = 2) -> list[ExampleGroup]:
    """Groups whose every number tells the group and the place in it."""

    def example(group: int, place: int) -> Example:
        tokens = [group, place, *range(3 + (group + place) % 4)]
        number = group * 10 + place
        return Example(
            tokens,
            weights=[0.5 * number] * len(tokens),
            columns={"advantages": [number + 0.25] * len(tokens)},
            values={"reward": float(number)},
        )

    return [
        ExampleGroup(
            [example(group, place) for place in range(size)],
            {"margin": float(group), "image": np.full((2, 3), group, np.float32)},
        )
        for group in range(count)
    ]


def batches_of_groups(tmp_path, groups: list[ExampleGroup], size: int = 2, make=build, source=None, **more) -> Batches:
    share = {name: more.pop(name) for name in ("process", "processes", "fields") if name in more}
    source = source or Examples(groups, groups[:3])
    fields = share.pop("fields", PAIR)
    return make(
        settings(tmp_path, **more), None, vocab=300, seed=1, source=source, rows_per_group=size, fields=fields, **share
    )


def check(batch: Batch, size: int) -> list[int]:
    """Whole groups in order, every array of its own row or group; the groups of the batch."""
    groups = batch["tokens"][::size, 0].tolist()
    for at, group in enumerate(groups):
        assert batch["margin"][at] == group
        assert (batch["image"][at] == group).all()
        for place in range(size):
            row, number = at * size + place, group * 10 + place
            filled = batch["segments"][row] > 0
            assert batch["tokens"][row, :2].tolist() == [group, place]
            assert filled.sum() == 4 + (group + place) % 4
            assert batch["reward"][row] == number
            assert (batch["advantages"][row] == np.where(filled, number + 0.25, 0)).all()
            assert (batch["mask"][row] == np.where(filled, 0.5 * number, 0)).all()
            assert (batch["targets"][row, :-1][filled[1:]] == batch["tokens"][row, 1:][filled[1:]]).all()
    return groups


@pytest.mark.parametrize("size, batch", [(2, 4), (3, 6), (4, 8)])
def test_groups_stay_whole_through_shuffling_and_batches(tmp_path, size, batch):
    stream = batches_of_groups(tmp_path, pairs(20, size), size, batch=batch)
    seen = [group for member in islice(stream, 20 * size // batch) for group in check(member, size)]
    assert len(set(seen)) == len(seen)
    assert seen != sorted(seen)


@pytest.mark.parametrize("processes", [2, 4])
def test_shares_of_processes_are_whole_groups(tmp_path, processes):
    whole = batches_of_groups(tmp_path, pairs(16), batch=8)
    parts = [batches_of_groups(tmp_path, pairs(16), batch=8, process=p, processes=processes) for p in range(processes)]
    for _ in range(6):
        together, shares = next(whole), [next(part) for part in parts]
        assert check(together, 2) == [group for share in shares for group in check(share, 2)]
        for name in PAIR:
            np.testing.assert_array_equal(together[name], np.concatenate([share[name] for share in shares]))


def test_a_position_in_groups_is_restored(tmp_path):
    stream = batches_of_groups(tmp_path, pairs(15), batch=4)
    for _ in range(9):
        next(stream)
    again = batches_of_groups(tmp_path, pairs(15), batch=4)
    again.restore(stream.state())
    assert [check(next(again), 2) for _ in range(8)] == [check(next(stream), 2) for _ in range(8)]


def test_evaluation_fills_up_with_blank_groups(tmp_path):
    batches = list(batches_of_groups(tmp_path, pairs(8), batch=4, make=eval_batches))
    assert [check(batches[0], 2), batches[1]["tokens"][0, 0]] == [[0, 1], 2]
    assert len(batches) == 2
    assert not any(array[len(array) // 2 :].any() for array in batches[1].values())


def test_a_batch_that_splits_groups_is_refused(tmp_path):
    with pytest.raises(BadInput, match="does not divide among 2 processes in groups of 2") as caught:
        batches_of_groups(tmp_path, pairs(8), batch=6, process=0, processes=2)
    assert "multiple of 4" in str(caught.value)
    with pytest.raises(BadInput, match="reads groups of 3 rows, and this data has groups of 2"):
        batches_of_groups(tmp_path, pairs(8), 3, batch=6)
    with pytest.raises(BadInput, match="reads single rows"):
        batches_of_groups(tmp_path, pairs(8), 1)
    for more in ({}, {"online": True}):
        with pytest.raises(BadInput, match="this data has single rows"):
            build(
                settings(tmp_path, **more), Bytes(), vocab=258, seed=0, source=TextsInMemory(["text " * 50]), rows_per_group=2
            )


def test_a_batch_holds_exactly_the_fields_that_were_asked_for(tmp_path):
    for fields in ({"tokens": Field("B T")}, PAIR, {"reward": Field("B", np.float64, "row")}):
        batch = next(batches_of_groups(tmp_path, pairs(8), fields=fields))
        assert list(batch) == list(fields)
        assert [batch[name].dtype for name in fields] == [np.dtype(field.dtype) for field in fields.values()]
    text = build(settings(tmp_path), Bytes(), vocab=258, seed=0, source=TextsInMemory(["some text " * 50]))
    assert list(next(text)) == ["tokens", "targets", "segments", "mask"]


@pytest.mark.parametrize("online", [False, True])
def test_a_field_that_the_data_lacks_is_named_with_what_there_is(tmp_path, online):
    fields = {**LANGUAGE_MODELING, "rewards": Field("B", np.float32, "row")}
    with pytest.raises(BadInput, match="no field `rewards`") as caught:
        build(
            settings(tmp_path, online=online), Bytes(), vocab=258, seed=0, source=TextsInMemory(["text " * 50]), fields=fields
        )
    assert "`tokens`, `targets`, `segments`, `mask`" in str(caught.value)


def test_fields_per_something_else_or_of_another_type_are_refused(tmp_path):
    for field, match in (
        (Field("B", np.float32, "group"), "per row"),
        (Field("B", np.int32, "row"), "float32 in this data"),
    ):
        with pytest.raises(BadInput, match=match):
            batches_of_groups(tmp_path, pairs(8), fields={"reward": field})


@pytest.mark.parametrize("packing", ["split", "fit"])
def test_columns_and_fractional_weights_survive_packing(tmp_path, packing):
    """Every learned target comes with the numbers of its own token."""
    draw, at, encoded = np.random.default_rng(0), 0, []
    for _ in range(60):
        size = int(draw.integers(1, 20))
        tokens = np.arange(at, at + size, dtype=np.uint16)
        encoded.append(Encoded(tokens, tokens / np.float32(8), columns={"advantages": tokens + np.float32(0.5)}))
        at += size
    corpus = corpus_of(encoded)
    fields = {**LANGUAGE_MODELING, "advantages": Field("B T", np.float32)}
    stream = build(
        settings(tmp_path, packing=packing, epochs=1, batch=1), None, vocab=at, seed=0, source=corpus, fields=fields
    )
    firsts, seen = set(corpus.starts[:-1].tolist()), []
    for batch in stream:
        has_advantage = batch["advantages"] != 0
        targets = batch["targets"][has_advantage]
        np.testing.assert_array_equal(batch["advantages"][has_advantage], targets + np.float32(0.5))
        np.testing.assert_array_equal(batch["mask"][has_advantage], targets / np.float32(8))
        assert not batch["mask"][~has_advantage].any()
        seen += targets.tolist()
    assert sorted(seen) == sorted(set(range(at)) - firsts)


@pytest.mark.parametrize("online", [False, True])
@pytest.mark.parametrize("packing", ["split", "fit"])
def test_fractional_weights_of_documents_reach_the_batch(tmp_path, packing, online):
    """Also where they come after documents without any, and after those of 0 and 1: on disk they then change type."""
    documents = [
        Document("plain text"),
        Document(tokens=list(range(20, 30)), learn=((5, 10),)),
        *(Document(tokens=[n] * 6, weights=[n / 16] * 6) for n in range(100, 140)),
    ]
    data_settings = settings(tmp_path, packing=packing, epochs=1, batch=1, online=online, shuffle=False)
    batches = list(build(data_settings, Bytes(), vocab=258, seed=0, source=TextsInMemory(documents)))
    pairs_ = {
        (int(target), float(weight))
        for batch in batches
        for target, weight in zip(batch["targets"][batch["mask"] > 0], batch["mask"][batch["mask"] > 0])
    }
    assert {(n, n / 16) for n in range(100, 140)} <= pairs_
    assert {(n, 1.0) for n in range(25, 30)} <= pairs_
    assert not {20, 21, 22, 23, 24} & {target for target, _ in pairs_}
    assert (ord("l"), 1.0) in pairs_


def test_a_held_out_tail_keeps_its_weights(tmp_path):
    document = Document(tokens=[7] * 1000, weights=[0.5] * 500 + [0.25] * 500)
    data_settings = settings(tmp_path, held_out=0.2)
    evaluated = list(eval_batches(data_settings, Bytes(), vocab=258, seed=0, source=TextsInMemory([document])))
    trained = build(data_settings, Bytes(), vocab=258, seed=0, source=TextsInMemory([document]))
    assert {float(w) for batch in evaluated for w in np.unique(batch["mask"])} == {0.0, 0.25}
    assert {float(w) for batch in islice(trained, 40) for w in np.unique(batch["mask"])} == {0.25, 0.5}


def test_two_corpora_in_memory_are_distinguished(tmp_path):
    def batches(weight: float) -> Batches:
        corpus = corpus_of([Encoded(np.arange(50, dtype=np.uint16), np.full(50, weight, np.float32))])
        return build(settings(tmp_path), None, vocab=50, seed=0, source=corpus)

    with pytest.raises(Exception, match=r"source\.sha256"):
        batches(0.5).restore(batches(0.25).state())
    first, other = batches_of_groups(tmp_path, pairs(8)), batches_of_groups(tmp_path, pairs(9))
    with pytest.raises(Exception, match=r"source\.sha256"):
        first.restore(other.state())


@pytest.mark.parametrize("groups, match", [
    ([ExampleGroup([Example([1, 2])]), ExampleGroup([Example([1, 2])] * 2)], "groups of 1 and 2 examples"),
    ([ExampleGroup([Example([1])])], "an example of 1 token,"),
    ([ExampleGroup([Example([1] * 10)])], "an example of 10 tokens, where a row takes 2 to 9"),
    ([ExampleGroup([Example([1, 300])])], "token 300 is outside"),
    ([ExampleGroup([Example([1, 2], weights=[1.0])])], "`weights` has 1 number for 2 tokens"),
    ([ExampleGroup([Example([1, 2], columns={"a": [1.0]})])], "`a` has 1 number"),
    ([ExampleGroup([Example([1, 2], columns={"a": [1, 2]}), Example([1, 2])])], "only some have the column `a`"),
    ([ExampleGroup([Example([1, 2])], {"x": 1}), ExampleGroup([Example([1, 2])])], "only some have the value of a group `x`"),
    ([ExampleGroup([Example([1, 2], values={"x": [1]}), Example([1, 2], values={"x": [1, 2]})])], "different shapes"),
    ([ExampleGroup([Example([1, 2], values={"mask": 1})])], "two fields are called `mask`"),
])  # fmt: skip
def test_mistakes_in_examples_are_reported_with_their_place(groups, match):
    with pytest.raises(BadInput, match=match):
        GroupRows(groups, 8, 300)


def test_mistakes_in_columns_of_a_corpus_are_reported():
    tokens, starts = np.arange(4, dtype=np.uint16), np.array([0, 4])
    with pytest.raises(BadInput, match="may not be called `mask`"):
        Corpus(tokens, starts, columns={"mask": np.ones(4, np.float32)})
    with pytest.raises(BadInput, match="3 numbers for 4 tokens"):
        Corpus(tokens, starts, columns={"a": np.ones(3, np.float32)})
    with pytest.raises(BadInput, match="only some documents have the column `a`"):
        corpus_of([Encoded(tokens), Encoded(tokens, columns={"a": np.ones(4, np.float32)})])


def test_batches_may_take_the_state_and_ignore_it_by_default(tmp_path):
    stream = batches_of_groups(tmp_path, pairs(8))
    expected = check(next(stream), 2)
    stream.rewind()
    stream.advance(object())
    assert check(next(stream), 2) == expected
