"""Mixtures: shares and epochs are exact, and one number is the position: over restarts, numbers of processes and devices."""

import json
import random
from collections import Counter

import data_files
import numpy as np
import pytest
from test_prepare import Bytes

from argosy.core.errors import BadInput, UserError
from argosy.core.settings import read_settings, words_layer
from argosy.data.mixtures.order import BLOCK, MixedOrder, OrderBySize, OrderByWeight, quotas_of
from argosy.data.pipeline import build, eval_batches, find
from argosy.data.settings import DataSettings

SIZES = (37, 11, 4)


def orders() -> dict[str, MixedOrder]:
    shares = [(0, (3, 1, 0.5))]
    steps = [(0, (3, 1, 0)), (5000, (1, 1, 1)), (9001, (0, 1, 2))]
    return {
        "by size": MixedOrder(SIZES, OrderBySize([37, 22, 4], 5), 5),
        "by weight": MixedOrder(SIZES, OrderByWeight(shares, 5), 5),
        "scheduled": MixedOrder(SIZES, OrderByWeight(steps, 5), 5),
        "unshuffled": MixedOrder(SIZES, OrderByWeight(steps, None), None),
    }


@pytest.mark.parametrize("name", orders())
def test_draws_are_those_of_a_loop_over_all_places(name):
    """Every source is read epoch by epoch: draw d of a source is the (d + 1)-th time that it is chosen, or, in a mixture by size, some
    draw of the same pass; nothing is left out and nothing comes twice."""
    order = orders()[name]
    places = np.arange(14_000)
    source, draw = order.order(places)
    for number in range(3):
        drawn_rows = draw[source == number]
        if name == "by size":
            whole = drawn_rows[: len(drawn_rows) // (37, 22, 4)[number] * (37, 22, 4)[number]]
            assert sorted(whole.tolist()) == list(range(len(whole)))
        else:
            assert drawn_rows.tolist() == list(range(len(drawn_rows)))
        if name != "by size":
            for place in (0, 1, 4095, 4096, 5000, 5001, 9001, 13_999):
                assert order.order.draws(place)[number] == (source[:place] == number).sum()
    # Asked for in any pieces and any order, places have the same rows.
    rows = order(places)
    draws = random.Random(1)
    for _ in range(5):
        some = np.array(draws.sample(range(14_000), 300))
        assert (orders()[name](some) == rows[some]).all()


@pytest.mark.parametrize("name", orders())
def test_every_epoch_of_a_source_holds_each_of_its_rows_once(name):
    order = orders()[name]
    rows = order(np.arange(12_000))
    for number, size in enumerate(SIZES):
        own_rows = rows[(rows >= order.offsets[number]) & (rows < order.offsets[number] + size)]
        passes = own_rows[: len(own_rows) // size * size].reshape(-1, size)
        if name == "by size":
            assert len(set(Counter(own_rows[: 37 * 22 * 4].tolist()).values())) <= 2
            continue
        assert len(passes) > 2
        assert all(len(set(pass_rows)) == size for pass_rows in passes.tolist())
        assert (name == "unshuffled") == all(pass_rows == sorted(pass_rows) for pass_rows in passes.tolist())


def test_a_pass_by_size_holds_every_row_as_often_as_asked():
    rows = orders()["by size"](np.arange(63 * 3))
    for epoch in rows.reshape(3, 63):
        assert Counter(epoch.tolist()) == Counter([*range(37), *range(37, 48), *range(37, 48), *range(48, 52)])


def test_shares_are_exact_in_every_block():
    source, _ = OrderByWeight([(0, (3, 1, 0.5))], 5)(np.arange(3 * BLOCK))
    for block in source.reshape(3, BLOCK):
        assert np.bincount(block).tolist() == quotas_of((3, 1, 0.5)).tolist()
    assert abs(quotas_of((3, 1, 0.5)) - BLOCK * np.array([3, 1, 0.5]) / 4.5).max() < 1
    assert quotas_of((1, 1, 1)).sum() == quotas_of((1e-3, 1, 1)).sum() == quotas_of((1.5e-4, *[1e-3] * 9, 1)).sum() == BLOCK
    with pytest.raises(BadInput, match="exact to 1/4096"):
        quotas_of((1e-5, 1))


def story(name: str, number: int) -> str:
    return f"{name} {number} " + "word " * (number % 5 + 1)


@pytest.fixture
def folder(tmp_path):
    for name, count in (("a", 60), ("b", 30)):
        rows = [{"text": story(name, number)} for number in range(count)]
        (tmp_path / f"{name}.{'jsonl' if name == 'a' else 'parquet'}").write_bytes(
            data_files.jsonl(rows) if name == "a" else data_files.parquet(rows)
        )
    chats = [{"messages": [{"role": "user", "content": f"c {n}?"}, {"role": "assistant", "content": str(n)}]} for n in range(20)]
    (tmp_path / "c.csv").write_bytes(data_files.csv_file([{"prompt": f"c {n}?", "completion": f" {n}"} for n in range(20)]))
    (tmp_path / "chats.jsonl").write_bytes(data_files.jsonl(chats))
    return tmp_path


def mixed_settings(folder, source: str, *words: str) -> DataSettings:
    source = source.replace("PATH", str(folder))
    setting_words = [f"source={source}", f"cache={folder / 'cache'}", "sequence=48", "batch=8", *words]
    if not any(word.startswith("packing") for word in words):
        setting_words.append("packing=fit")
    return read_settings(DataSettings, words_layer(setting_words)).value


WEIGHTED = "[{path: PATH/a.jsonl, weight: 3}, {path: PATH/b.parquet, weight: 1}, {path: PATH/c.csv, weight: 1}]"
BY_SIZE = "[PATH/a.jsonl, {path: PATH/b.parquet, epochs: 2}]"
SCHEDULED = "[{path: PATH/a.jsonl, weight: {0: 1, 6: 0}}, {path: PATH/b.parquet, weight: {0: 0, 3: 1}}]"
MIXTURES = {
    "weights": (WEIGHTED,), "sizes": (BY_SIZE,), "schedule": (SCHEDULED,), "tokens": (WEIGHTED, "weight_unit=tokens"),
    "temperature": (BY_SIZE.replace(", epochs: 2", ""), "mixture_temperature=2"),
}  # fmt: skip


def batches(settings: DataSettings, process=0, processes=1, make=build, **options):
    return make(settings, Bytes(), vocab=258, seed=3, process=process, processes=processes, **options)


def rows_of(batch) -> list[bytes]:
    return [b"".join(array[row].tobytes() for array in batch.values()) for row in range(len(batch["tokens"]))]


@pytest.mark.parametrize("name", MIXTURES)
def test_killed_at_random_and_on_any_number_of_processes_a_mixture_gives_the_same_rows(folder, name):
    settings = mixed_settings(folder, *MIXTURES[name])
    stream = batches(settings)
    whole = [rows_of(next(stream)) for _ in range(40)]
    draw, step, seen, state = random.Random(11), 0, [], None
    for _ in range(20):
        processes = draw.choice([1, 2, 4, 8])
        shards = [batches(settings, process, processes) for process in range(processes)]
        for shard in shards:
            if state is not None:
                shard.restore(json.loads(json.dumps(state)))
        for _ in range(draw.randint(1, 3)):
            if step < 40:
                seen.append([row for shard in shards for row in rows_of(next(shard))])
                step += 1
        # Batches made ahead are not part of the state.
        state = shards[0].state()
        assert all(shard.state() == state for shard in shards)
        assert state["position"] == {"row": 8 * step}
        for shard in shards:
            shard.close()
    assert len(seen) > 30
    assert seen == whole[: len(seen)]


def words_of(batch) -> list[str]:
    """The first letter of each document."""
    letters = []
    for tokens, segments in zip(batch["tokens"], batch["segments"]):
        for segment in range(1, segments.max() + 1):
            letters.append(chr(tokens[segments == segment][0]))
    return letters


def test_the_summary_says_how_much_of_each_is_seen_and_batches_agree(folder):
    settings = mixed_settings(folder, WEIGHTED, "packing=alone", "held_out=0")
    stream = batches(settings)
    summary = stream.summary(steps=50)
    counts = Counter(word for _ in range(50) for word in words_of(next(stream)))
    for part, name in zip(summary.parts, "abc"):
        assert part.share == counts[name] / 400
        assert part.epochs == counts[name] / part.rows
    assert sum(part.share for part in summary.parts) == 1
    assert abs(summary.parts[0].share - 0.6) < 0.08
    assert f"{100 * summary.parts[0].share:.3g} % {folder}/a.jsonl (60 rows, {summary.parts[0].epochs:.3g} epochs)" in summary.text


def test_an_epoch_without_weights_holds_every_row(folder):
    settings = mixed_settings(folder, BY_SIZE, "packing=alone", "held_out=0", "epochs=2", "batch=4")
    counts = Counter(word for batch in batches(settings) for word in words_of(batch))
    assert counts == {"a": 120, "b": 120}
    assert batches(settings).summary().ends_after == 60


def test_weights_change_at_their_steps(folder):
    stream = batches(mixed_settings(folder, SCHEDULED, "packing=alone", "held_out=0"))
    each = [set(words_of(next(stream))) for _ in range(10)]
    assert each[:3] == [{"a"}] * 3
    assert set.union(*each[3:6]) == {"a", "b"}
    assert each[6:] == [{"b"}] * 4


def test_weights_by_tokens_count_targets(folder):
    source = "[{path: PATH/a.jsonl, weight: 1}, {path: PATH/c.csv, weight: 1}]"
    settings = mixed_settings(folder, source, "packing=alone", "held_out=0", "weight_unit=tokens")
    stream, targets = batches(settings), Counter()
    for _ in range(300):
        batch = next(stream)
        for tokens, segments in zip(batch["tokens"], batch["segments"]):
            targets[chr(tokens[0])] += int((segments > 0).sum())
    assert 0.47 < targets["a"] / (targets["a"] + targets["c"]) < 0.53


def test_every_source_has_its_own_format_template_and_share_held_out(folder):
    source = "[{path: PATH/chats.jsonl, template: chatml, held_out: 0.5}, {path: PATH/a.jsonl, held_out: 0}, "
    source += "{path: PATH/c.csv, learn: all, held_out: 0}]"
    settings = mixed_settings(folder, source, "epochs=1", "batch=1", "packing=alone", "sequence=128")
    decoded = [Bytes().decode(batch["tokens"][0].tolist()) for batch in batches(settings)]
    assert sum(text.startswith("<|im_start|>user") for text in decoded) == 10
    assert sum(text.startswith("a ") for text in decoded) == 60
    evaluated = list(batches(settings, make=eval_batches))
    assert len(evaluated) == 10
    learned = [int(batch["mask"].sum()) for batch in batches(settings) if chr(batch["tokens"][0, 0]) == "c"]
    assert min(learned) > 5


def test_pairs_mix_in_whole_groups(tmp_path):
    for name in "xy":
        rows = [{"prompt": f"{name} {n}?", "chosen": f" {n}", "rejected": " none"} for n in range(24)]
        (tmp_path / f"{name}.jsonl").write_bytes(data_files.jsonl(rows))
    settings = mixed_settings(tmp_path, "[{path: PATH/x.jsonl, weight: 1}, {path: PATH/y.jsonl, weight: 2}]", "packing=alone")
    batch = next(build(settings, Bytes(), vocab=258, seed=0, rows_per_group=2))
    firsts = [bytes(row[:5].astype(np.uint8)) for row in batch["tokens"]]
    assert firsts[::2] == firsts[1::2]
    (tmp_path / "t.jsonl").write_bytes(data_files.jsonl([{"text": story("t", n)} for n in range(20)]))
    with pytest.raises(BadInput, match="cannot be mixed: their rows come in groups of 2 and 1"):
        build(mixed_settings(tmp_path, "[PATH/x.jsonl, PATH/t.jsonl]"), Bytes(), vocab=258, seed=0, rows_per_group=2)


@pytest.mark.parametrize(("source", "words", "says"), [
    ("[{path: PATH/a.jsonl, weight: 1}, PATH/b.parquet]", [], "has a weight, and"),
    ("[{path: PATH/a.jsonl, weight: 1, epochs: 2}]", [], "has a weight and epochs"),
    ("[{path: PATH/a.jsonl, weight: 1}]", ["epochs=2"], "data.epochs counts passes"),
    ("[{path: PATH/a.jsonl, weight: 1}]", ["mixture_temperature=2"], "data.mixture_temperature makes weights of sizes"),
    ("[PATH/a.jsonl]", ["online=true"], "not read online"),
    ("[PATH/gone.jsonl]", [], "no such data source"),
    ("[{path: PATH/a.jsonl, weight: {0: 1, 5: 0}}]", [], "all weights are 0 from step 5 on"),
])  # fmt: skip
def test_mixtures_that_contradict_themselves(folder, source, words, says):
    settings = mixed_settings(folder, source, *words)
    with pytest.raises(UserError, match=says):
        batches(settings, source=find(settings))


@pytest.mark.parametrize(("source", "says"), [
    ("[{path: a, weight: 0}]", "a weight is more than 0"),
    ("[{path: a, weight: {5: 1}}]", "begin at step 0"),
    ("[{path: a, weigth: 1}]", "no key `weigth` in source 1; did you mean `weight`"),
    ("[a, {path: b, epochs: -1}]", "wrong `epochs` in source 2"),
])  # fmt: skip
def test_mistakes_in_a_source_are_named(folder, source, says):
    with pytest.raises(UserError, match=says):
        mixed_settings(folder, source)


def test_another_weight_is_other_data(folder):
    state = batches(mixed_settings(folder, WEIGHTED)).state()
    with pytest.raises(UserError, match="weight of 0"):
        batches(mixed_settings(folder, WEIGHTED.replace("weight: 3", "weight: 2"))).restore(state)
