"""The shuffle of blocks: a permutation, local in windows, with one number as its position."""

import json
import random

import data_files
import numpy as np
import pytest
from test_prepare import Bytes

from argosy.core.errors import BadInput, UserError
from argosy.data.order import BlockOrder
from argosy.data.pipeline import build
from argosy.data.settings import DataSettings

SIZES = [(1000, 10, 8), (1003, 10, 8), (7, 10, 8), (80, 10, 8), (81, 10, 8), (999, 1, 3), (500, 7, 100)]


@pytest.mark.parametrize(("rows", "block", "window"), SIZES)
def test_every_epoch_is_a_permutation_of_all_rows(rows, block, window):
    order = BlockOrder(rows, 5, block, window)
    seen = order(np.arange(3 * rows)).reshape(3, rows)
    for epoch in seen:
        assert sorted(epoch.tolist()) == list(range(rows))
    assert rows < 10 or not np.array_equal(seen[0], seen[1])
    # In any pieces, places have the same rows.
    draw = random.Random(1)
    for _ in range(5):
        some = np.array(draw.choices(range(3 * rows), k=50))
        assert (BlockOrder(rows, 5, block, window)(some) == seen.ravel()[some]).all()
    assert not np.array_equal(BlockOrder(rows, 6, block, window)(np.arange(rows)), seen[0]) or rows < 10


def test_a_window_reads_so_many_blocks_whole_and_mixes_them():
    """Levanter's `BlockShuffleConfig`: blocks are permuted, and rows within each window of blocks."""
    rows, block, window = 6400, 10, 16
    order = BlockOrder(rows, 3, block, window)
    windows = order(np.arange(rows)).reshape(-1, block * window)
    first = []
    for window_rows in windows:
        blocks = set((window_rows // block).tolist())
        assert len(blocks) == window
        assert sorted(window_rows.tolist()) == sorted(
            row for block_number in blocks for row in range(block_number * block, block_number * block + block)
        )
        # A batch of 64 comes from nearly all blocks of its window: 16 (1 - (1 - 1/16)^64) = 15.7 expected.
        assert len(set((window_rows[:64] // block).tolist())) >= 13
        first.append(window_rows[0])
    # Windows lie anywhere in the table, and their rows stand in no order.
    assert abs(np.corrcoef(np.arange(len(first)), first)[0, 1]) < 0.5
    inside = [np.corrcoef(np.arange(len(window)), window)[0, 1] for window in windows]
    assert abs(np.mean(inside)) < 0.05


@pytest.fixture
def settings(tmp_path):
    rows = [{"text": f"{number} " * 9} for number in range(300)]
    (tmp_path / "a.jsonl").write_bytes(data_files.jsonl(rows))
    fields = {"sequence": 32, "batch": 8, "held_out": 0, "shuffle_block": 4, "shuffle_window": 5, "cache": str(tmp_path / "cache")}
    return DataSettings(source=str(tmp_path / "a.jsonl"), **fields)


def stream(settings, process=0, processes=1):
    return build(settings, Bytes(), vocab=258, seed=3, process=process, processes=processes)


def test_one_number_is_the_position_on_any_number_of_processes(settings):
    whole_stream = stream(settings)
    whole = [next(whole_stream)["tokens"] for _ in range(60)]
    draw, step, state = random.Random(2), 0, None
    while step < 50:
        processes = draw.choice([1, 2, 4, 8])
        shards = [stream(settings, process, processes) for process in range(processes)]
        for shard in shards:
            if state is not None:
                shard.restore(json.loads(json.dumps(state)))
        for _ in range(draw.randint(1, 6)):
            assert np.array_equal(np.concatenate([next(shard)["tokens"] for shard in shards]), whole[step])
            step += 1
        state = shards[-1].state()
        assert state["position"] == {"row": 8 * step}
    full = stream(settings.model_copy(update={"shuffle_block": None}))
    with pytest.raises(UserError, match="shuffle was 5 blocks of 4, is order 1"):
        full.restore(state)


@pytest.mark.parametrize(("changes", "says"), [
    ({"shuffle": False}, "nothing is shuffled"),
    ({"packing": "fit"}, r"data\.packing=fit puts documents from anywhere"),
    ({"online": True}, "not in data that is read online"),
])  # fmt: skip
def test_where_it_would_be_ignored_it_is_refused(settings, changes, says):
    with pytest.raises(BadInput, match=says) as caught:
        stream(settings.model_copy(update=changes))
    assert caught.value.where == "data.shuffle_block=4"


def test_a_mixture_refuses_it(settings):
    from argosy.data.mixtures.settings import MixedSource

    with pytest.raises(BadInput, match="not in a mixture"):
        stream(settings.model_copy(update={"source": [MixedSource(path=str(settings.source))] * 2}))
