"""Pipelines: what the laws do not say. Order, state, epochs, refusals, streams, the cache."""

import json
import os
import subprocess
import sys
from itertools import islice

import grain
import numpy as np
import pytest
from test_prepare import Bytes, stories
from test_source_laws import flat, take

from argosy.core.errors import BadInput, UserError
from argosy.data import order as order_module
from argosy.data import pipeline, tables
from argosy.data.batch import Batches, check_same
from argosy.data.encoding import Encoding
from argosy.data.order import Order
from argosy.data.pipeline import build, eval_batches
from argosy.data.prepare import prepare
from argosy.data.settings import DataSettings
from argosy.data.sources import Capped, Document, opening
from argosy.data.sources.folder import FileSet
from argosy.data.sources.synthetic import Synthetic, mix, splitmix
from argosy.data.sources.text import TextFile, TextsInMemory

GOLDEN_SORTED = [590, 971, 318, 260, 738, 245]
GOLDEN_INDEX = [1277463, 1329378, 1099074, 1791703, 1884993, 1528564]


@pytest.fixture
def settings(tmp_path) -> DataSettings:
    return DataSettings(sequence=16, batch=4, cache=str(tmp_path / "cache"), held_out=0.1)


def change_settings(settings: DataSettings, **values) -> DataSettings:
    return settings.model_copy(update=values)


def batches_of(settings: DataSettings, source=None, *, seed=1, make=build, **share) -> Batches:
    return make(settings, Bytes(), vocab=258, seed=seed, source=source or TextsInMemory(stories(90)), **share)


def test_building_is_what_imports_jax():
    program = "import sys, argosy.data.pipeline, argosy.data.inspect; assert not {'jax', 'grain'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("rows", [1, 2, 7, 100, 1025])
@pytest.mark.parametrize("sorted_rows", [0, 1 << 20])
def test_an_epoch_is_a_permutation_of_its_own(monkeypatch, rows, sorted_rows):
    monkeypatch.setattr(order_module, "SORTED_ROWS", sorted_rows)
    order = Order(rows, 5)
    epochs = [order(np.arange(epoch * rows, (epoch + 1) * rows)).tolist() for epoch in range(4)]
    assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)
    assert rows < 7 or len({tuple(epoch) for epoch in epochs}) == 4
    across = order(np.arange(rows // 2, 2 * rows))
    assert across.tolist() == [*epochs[0][rows // 2 :], *epochs[1]]


def test_a_large_table_is_shuffled_as_grain_does(monkeypatch):
    monkeypatch.setattr(order_module, "SORTED_ROWS", 0)
    order = Order(5000, 5)
    theirs = grain.MapDataset.range(5000).shuffle(seed=order.epoch_seed(0) % 2**32)
    assert order(np.arange(100)).tolist() == [theirs[i] for i in range(100)]


@pytest.mark.parametrize("rows, expected", [(1000, GOLDEN_SORTED), (1 << 21, GOLDEN_INDEX)])
def test_the_order_is_the_one_that_runs_were_saved_in(rows, expected):
    """Golden: another way of shuffling would resume old runs onto other rows, and needs another fingerprint."""
    assert Order(rows, 0)(np.arange(rows - 2, rows + 4)).tolist() == expected


def test_near_seeds_share_no_epoch():
    seeds = {Order(10, seed).epoch_seed(epoch) for seed in range(50) for epoch in range(50)}
    assert len(seeds) == 2500


def test_splitmix_is_the_published_generator():
    # The first outputs of the reference implementation (Vigna's splitmix64.c) for the seed 1234567.
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert splitmix(np.array([1234567], np.uint64), np.arange(5, dtype=np.uint64)).tolist() == expected
    assert mix(np.zeros(1, np.uint64)).tolist() == [0]


def test_synthetic_tokens_are_uniform_over_the_models_vocabulary():
    batch = Synthetic().rows(sequence=1000, vocab=7, seed=0).gather(np.arange(100))
    counts = np.bincount(batch["tokens"].ravel(), minlength=7)
    assert len(counts) == 7
    assert np.abs(counts / 1e5 * 7 - 1).max() < 0.03
    np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])


def test_synthetic_needs_no_tokenizer(settings):
    batch = next(build(change_settings(settings, source="synthetic"), None, vocab=11, seed=0))
    assert batch["tokens"].max() < 11
    assert batch["mask"].all()


def test_the_state_is_that_of_batches_handed_out(settings):
    stream = batches_of(change_settings(settings, prefetch=8))
    assert stream.state()["position"] == {"row": 0}
    for step in range(1, 5):
        next(stream)
        assert stream.state()["position"] == {"row": step * 4}


@pytest.mark.parametrize("prefetch", [0, 1, 5])
@pytest.mark.parametrize("block_tokens", [1, 200, 1 << 14])
def test_reading_ahead_and_blocks_do_not_show(settings, monkeypatch, prefetch, block_tokens):
    expected = take(batches_of(settings), 30)
    monkeypatch.setattr(pipeline, "BLOCK_TOKENS", block_tokens)
    stream = batches_of(change_settings(settings, prefetch=prefetch))
    assert take(stream, 30) == expected
    stream.seek({"row": 4 * 7})
    assert take(stream, 9) == expected[7:16]


@pytest.mark.parametrize(
    "change, names",
    [
        ({"sequence": 8}, ["sequence"]),
        ({"batch": 8}, ["batch"]),
        ({"shuffle": False}, ["shuffle"]),
        ({"packing": "fit"}, ["packing"]),
        ({"seed": 9}, ["seed"]),
        ({"bos": True}, ["bos"]),
        ({"held_out": 0.2, "seed": 3}, ["held_out", "seed"]),
    ],
)
def test_a_position_is_refused_on_other_data(settings, change, names):
    state = batches_of(settings).state()
    with pytest.raises(UserError, match=f"belongs to: {', '.join(names)}\n") as e:
        batches_of(change_settings(settings, **change)).restore(state)
    assert len(str(e.value).splitlines()) <= 5
    assert e.value.exit_code == 2


def test_other_text_or_tokens_are_refused_too(settings):
    state = batches_of(settings).state()
    with pytest.raises(UserError, match=r"source\.sha256"):
        batches_of(settings, TextsInMemory(stories(91))).restore(state)

    class Other(Bytes):
        fingerprint = "other"

    with pytest.raises(UserError, match="tokenizer"):
        build(settings, Other(), vocab=258, seed=1, source=TextsInMemory(stories(90))).restore(state)


def test_what_may_differ_on_resume(settings):
    state = batches_of(settings).state()
    for change in ({"epochs": 2.0}, {"prefetch": 0}, {"cache": str(settings.cache) + "2"}):
        batches_of(change_settings(settings, **change)).restore(state)


@pytest.mark.parametrize("state", [None, {}, {"fingerprint": 1}, []])
def test_what_is_no_state_is_reported(settings, state):
    with pytest.raises(BadInput, match="not the state"):
        batches_of(settings).restore(state)


@pytest.mark.parametrize("position", [{"row": -4}, {"row": "4"}, {"row": 3}, {"epoch": 0}, {"row": True}])
def test_what_is_no_position_is_reported(settings, position):
    with pytest.raises(BadInput, match=r"position|begin a batch"):
        batches_of(settings).seek(position)


def test_differences_are_reported_with_both_values():
    with pytest.raises(UserError) as e:
        check_same({"a": 1, "b": "x" * 64}, {"a": 2, "b": "x" * 64, "c": None, "d": 1})
    assert "a was 1, is 2; d was None, is 1" in str(e.value)
    assert "b was" not in str(e.value)
    with pytest.raises(UserError) as e:
        check_same({}, dict.fromkeys("abcdef", 1))
    assert all(f"{key} was None, is 1" in str(e.value) for key in "abcdef")


@pytest.mark.parametrize("epochs, batches", [(1, 2), (1.5, 3), (0.4, 1), (3, 7)])
def test_epochs_end_after_the_last_whole_batch(settings, epochs, batches):
    ten_rows = TextsInMemory([Document(tokens=list(range(160)))])
    stream = batches_of(change_settings(settings, epochs=epochs, held_out=0.0), ten_rows)
    assert len(list(stream)) == batches
    stream.seek({"row": 4 * (batches - 1)})
    assert len(list(stream)) == 1


def test_too_few_rows_for_a_batch_are_reported(settings):
    with pytest.raises(BadInput, match="do not fill a batch of 4"):
        batches_of(change_settings(settings, epochs=0.1, held_out=0.0), TextsInMemory([Document(tokens=list(range(160)))]))


def test_a_corpus_smaller_than_a_batch_fills_it_from_its_next_epochs(settings):
    batch = next(batches_of(change_settings(settings, held_out=0.0), TextsInMemory(["a short text"])))
    assert (batch["tokens"] == batch["tokens"][0]).all()


def test_evaluation_is_filled_up_with_padding(settings):
    tokens = list(range(199))
    held_out = batches_of(change_settings(settings, held_out=0.5), TextsInMemory([Document(tokens=tokens)]), make=eval_batches)
    batches = list(held_out)
    assert [int((batch["segments"] > 0).sum()) for batch in batches] == [64, 36]  # 100 of 200, one row and 12 short
    assert sum(int(batch["mask"].sum()) for batch in batches) == 99
    assert not any(batches[-1][name][3].any() for name in batches[-1])
    assert list(held_out) == []


def test_evaluation_may_be_limited(settings):
    every = take(batches_of(change_settings(settings, held_out=0.5), make=eval_batches))
    assert take(batches_of(change_settings(settings, held_out=0.5), make=eval_batches, limit=3)) == every[:3]
    assert len(every) > 3


def test_nothing_held_out_is_reported(settings):
    with pytest.raises(BadInput, match="nothing to evaluate"):
        batches_of(change_settings(settings, held_out=0.0), make=eval_batches)


def test_batches_divide_among_processes_or_it_is_reported(settings):
    with pytest.raises(BadInput, match="does not divide among 3 processes"):
        batches_of(settings, process=0, processes=3)


def test_a_tokenizer_larger_than_the_model_is_reported(settings):
    with pytest.raises(BadInput, match="258 tokens, the model only 257"):
        build(settings, Bytes(), vocab=257, seed=0, source=TextsInMemory(["x"]))
    with pytest.raises(BadInput, match="needs a tokenizer"):
        build(settings, None, vocab=257, seed=0, source=TextsInMemory(["x"]))


def test_a_prepared_folder_is_a_source(settings, tmp_path):
    prepare(TextsInMemory(stories(90)), Encoding(Bytes()), tmp_path / "corpus", held_out=0.1)
    folder_settings = change_settings(settings, source=str(tmp_path / "corpus"))
    stream = build(folder_settings, Bytes(), vocab=258, seed=1)
    assert take(stream, 9) == take(batches_of(settings), 9)

    class Other(Bytes):
        fingerprint = "other"

    with pytest.raises(BadInput, match="another tokenizer"):
        build(folder_settings, Other(), vocab=258, seed=1)
    with pytest.raises(BadInput, match="not read online"):
        build(change_settings(folder_settings, online=True), Bytes(), vocab=258, seed=1)


def test_the_cache_is_used_and_mended(settings, monkeypatch):
    expected = take(batches_of(settings), 5)
    [folder] = (child for child in tables.corpus_cache(settings).iterdir())
    monkeypatch.setattr(tables, "prepare", None)
    assert take(batches_of(settings), 5) == expected
    monkeypatch.undo()
    (folder / "train" / "tokens.bin").unlink()  # not cut short in place: that kills whoever still maps it
    assert take(batches_of(settings), 5) == expected


@pytest.mark.parametrize("source", [TextFile, FileSet, lambda path: Capped(TextFile(path), 4000)])
def test_the_cache_notices_an_edit_between_the_samples_of_a_large_file(settings, tmp_path, monkeypatch, source):
    monkeypatch.setattr(opening, "HASHED_BYTES", 1000)
    monkeypatch.setattr(opening, "PIECE_BYTES", 10)
    settings = change_settings(settings, held_out=0.0, shuffle=False)
    path = tmp_path / "large.txt"
    path.write_text("a" * 5000)
    os.utime(path, ns=(1, 1))
    before, fingerprint = take(batches_of(settings, source(path)), 5), source(path).fingerprint()
    # Samples of 10 bytes lie 79 bytes apart.
    path.write_text("a" * 40 + "b" + "a" * 4959)
    os.utime(path, ns=(2, 2))
    assert source(path).fingerprint() == fingerprint
    assert take(batches_of(settings, source(path)), 5) != before
    monkeypatch.setattr(tables, "prepare", None)
    batches_of(settings, source(path))


def test_the_cache_is_where_xdg_says(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tables.corpus_cache(DataSettings()) == tmp_path / "argosy" / "corpora"


def test_much_text_asks_to_be_prepared(settings, monkeypatch):
    monkeypatch.setattr(tables, "CORPUS_BYTES", 100)
    with pytest.raises(BadInput, match="too many to tokenize") as e:
        batches_of(settings)
    assert "argosy data prepare" in str(e.value)


@pytest.fixture(params=["split", "fit"])
def online(request, settings, monkeypatch) -> DataSettings:
    monkeypatch.setattr("argosy.data.prepare.GROUP_BYTES", 700)  # several windows an epoch
    return change_settings(settings, online=True, packing=request.param)


def test_a_stream_holds_every_target_once_an_epoch(online):
    tokens = [list(range(i, i + 5)) for i in range(0, 250, 5)]
    stream = batches_of(
        change_settings(online, held_out=0.0, epochs=1, batch=1), TextsInMemory([Document(tokens=ids) for ids in tokens])
    )
    learned = [target for batch in stream for target in batch["targets"][batch["mask"] > 0].tolist()]
    assert sorted(target for target in learned if target != 257) == sorted(i for ids in tokens for i in ids[1:])
    assert learned.count(257) == 50


def test_a_stream_is_restorable_at_any_position(online):
    whole = take(batches_of(online), 60)
    stream, restored = batches_of(online), batches_of(change_settings(online, prefetch=0))
    seen = []
    for count in range(50):
        state = json.loads(json.dumps(stream.state()))
        restored.restore(state)
        assert take(restored, 2) == whole[count : count + 2]
        next(stream)
        seen.append(state["position"])
    assert {position["epoch"] for position in seen} > {0}
    assert len({position["document"] for position in seen}) > 3
    stream.rewind()
    assert take(stream, 3) == whole[:3]


def test_a_stream_continues_inside_a_long_document(online):
    pieces = TextsInMemory([Document(f"{i} {text}" * 9, ends=i % 8 == 7) for i, text in enumerate(stories(64))])
    long = change_settings(online, bos=True, held_out=0.0, epochs=1)
    whole = take(batches_of(long, pieces))
    stream, restored = batches_of(long, pieces), batches_of(long, pieces)
    for position in range(len(whole)):
        restored.restore(stream.state())
        assert take(restored, 1) == [whole[position]]
        next(stream)
    assert sum(row[0].count(256) for row in flat(whole)) <= 8


def test_streams_of_two_processes_share_the_documents(online):
    def seen(process: int, processes: int) -> set[int]:
        source = TextsInMemory([Document(tokens=[i] * 9) for i in range(100)])
        share = change_settings(online, held_out=0.0)
        stream = batches_of(share, source, process=process, processes=processes)
        return {token for batch in islice(stream, 60) for token in np.unique(batch["tokens"]).tolist()} - {0, 257}

    assert seen(0, 2) | seen(1, 2) == seen(0, 1) == set(range(1, 100))
    assert not seen(0, 2) & seen(1, 2)


def test_a_streams_position_is_refused_among_another_number_of_processes(online):
    state = batches_of(online, process=1, processes=2).state()
    with pytest.raises(UserError, match="`processes` was 2, is 4") as e:
        batches_of(online, process=1, processes=4).restore(state)
    assert "online=false" in str(e.value)
    with pytest.raises(UserError, match="sequence"):
        batches_of(change_settings(online, sequence=8), process=1, processes=2).restore(state)


def test_a_stream_that_gives_a_process_nothing_is_reported(online):
    with pytest.raises(BadInput, match="process 1 of 2"):
        next(batches_of(change_settings(online, held_out=0.0), TextsInMemory(["one text"]), process=1, processes=2))
    with pytest.raises(BadInput, match="end online data together"):
        batches_of(change_settings(online, epochs=1), processes=2)


def test_a_stream_holds_out_the_same_documents_each_time(online):
    texts = [f"{i} {text}" for i, text in enumerate(stories(400))]
    wide = change_settings(online, held_out=0.2, sequence=128, packing="fit", epochs=1, batch=1)
    trained = {bytes(row[0]) for row in flat(take(batches_of(wide, TextsInMemory(texts))))}
    held_out = batches_of(wide, TextsInMemory(texts), make=eval_batches)
    held_texts = {bytes(row[0]) for row in flat(take(held_out))}
    assert held_out.bytes_per_token == 1.0
    joined, apart = b"".join(trained), b"".join(held_texts)
    inside = [text for text in texts if text.encode() in apart]
    assert 0.1 * 400 < len(inside) < 0.4 * 400
    assert all((text.encode() in joined) != (text.encode() in apart) for text in texts)


def test_an_open_stream_does_not_disturb_the_end_of_the_program():
    program = """
import sys; sys.path[:0] = {path!r}
from test_prepare import *
from argosy.data.pipeline import build
from argosy.data.settings import DataSettings
stream = build(DataSettings(online=True, sequence=16), Bytes(), vocab=258, seed=0, source=TextsInMemory(stories(90)))
next(stream)
"""
    path = [entry for entry in sys.path if entry.endswith(("tests", "data"))]
    ended = subprocess.run(
        [sys.executable, "-c", program.format(path=path)], capture_output=True, text=True, check=True
    )
    assert ended.stderr == ""


def test_closed_twice_and_never_used_again(online, settings):
    for stream in (batches_of(online), batches_of(settings)):
        next(stream)
        stream.close()
        stream.close()
        with pytest.raises(ValueError, match="closed"):
            next(stream)
