"""The laws of every registered source: deterministic, restorable at any position, shards disjoint and complete, and epochs
that hold the same rows in another order. A new source is tested by being registered, with a small example of it below.
"""

import json
from collections import Counter
from itertools import islice, pairwise

import data_files
import datasets
import numpy as np
import pytest
from test_prepare import Bytes, stories

from argosy.core.formats.png import png_bytes
from argosy.data.batch import Batch, Batches
from argosy.data.images.arrays import ImageArrays
from argosy.data.images.folder import ImageFolder
from argosy.data.images.settings import ImageSettings
from argosy.data.images.shards import ImageShards
from argosy.data.images.table import IMAGES, LABELS
from argosy.data.pipeline import build, eval_batches
from argosy.data.settings import DataSettings
from argosy.data.sources import SOURCES, RowSource, Source
from argosy.data.sources.clicks import CLICK_FIELDS, Clicks
from argosy.data.sources.find import find_source
from argosy.data.sources.folder import FileSet
from argosy.data.sources.jsonl import JsonLines
from argosy.data.sources.stdlib import Docstrings, StandardLibrary
from argosy.data.sources.synthetic import Synthetic
from argosy.data.sources.text import TextFile, TextsInMemory
from argosy.models.diffusion.base import ImageSpace

SEQUENCE, BATCH = 16, 8
IMAGE_FIELDS = {"images": IMAGES, "labels": LABELS}


def text_file(folder):
    (folder / "t.txt").write_text("\n\n".join(stories(60)))
    return TextFile(folder / "t.txt")


def json_lines(folder):
    (folder / "t.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in stories(70)))
    return JsonLines(folder / "t.jsonl")


def both(folder):
    text_file(folder)
    json_lines(folder)
    return FileSet(folder, documents="paragraphs")


def modules(folder):
    for i, text in enumerate(stories(30)):
        (folder / f"m{i}.py").write_text(f'"""{i} {text} {i}"""\n')
    return folder


def arrays(folder):
    draw = np.random.default_rng(0)
    np.savez(folder / "a.npz", images=draw.integers(0, 256, (60, 3, 4, 3), np.uint8), labels=draw.integers(0, 5, 60))
    return ImageArrays(str(folder / "a.npz"), ImageSettings(), 0.2)


def write_example(name, rows=None):
    """An example that a library wrote, of the kind that the name says."""

    def make(folder):
        content = [{"text": text} for text in stories(70)] if rows is None else rows
        if name.endswith(".bin"):
            data_files.megatron(folder / name, [list(row["text"].encode()) for row in content])
        else:
            (folder / name).write_bytes(data_files.KINDS[name](content))
        source = find_source(DataSettings(source=str(folder / name)))
        assert isinstance(source, Source)
        return source

    return make


def hub(folder):
    datasets.disable_progress_bars()
    datasets.Dataset.from_list([{"text": text} for text in stories(70)]).save_to_disk(str(folder / "set"))
    source = find_source(DataSettings(source=f"hf:{folder}/set"))
    assert isinstance(source, Source)
    return source


def mosaic(folder):
    data_files.mds(folder / "set", [{"text": text, "id": number} for number, text in enumerate(stories(70))], per_shard=20)
    source = find_source(DataSettings(source=f"{folder}/set"))
    assert isinstance(source, Source)
    return source


def image_files(folder):
    draw = np.random.default_rng(0)
    for i in range(60):
        (folder / f"class{i % 5}").mkdir(exist_ok=True)
        (folder / f"class{i % 5}" / f"{i}.png").write_bytes(png_bytes(draw.integers(0, 256, (3, 4, 3), np.uint8)))
    return ImageFolder(str(folder), ImageSettings(), 0.2)


def image_shards(folder):
    draw = np.random.default_rng(0)
    images = [png_bytes(draw.integers(0, 256, (3, 4, 3), np.uint8)) for _ in range(60)]
    data_files.parquet_images(folder / "a.parquet", images, [i % 5 for i in range(60)])
    return ImageShards(str(folder / "a.parquet"), ImageSettings(), 0.2)


EXAMPLES = {
    "text": text_file,
    "hf": hub,
    "jsonl": json_lines,
    "csv": write_example("rows.csv"),
    "parquet": write_example("rows.parquet"),
    "arrow": write_example("rows.arrow"),
    "tfrecord": write_example("rows.tfrecord"),
    "array_record": write_example("rows.array_record"),
    "bagz": write_example("rows.bagz"),
    "mds": mosaic,
    "tar": write_example("rows.tar"),
    "tokens": write_example("rows.bin"),
    "folder": both,
    "memory": lambda folder: TextsInMemory(stories(80)),
    "stdlib": lambda folder: StandardLibrary(modules(folder)),
    "docstrings": lambda folder: Docstrings(modules(folder)),
    "synthetic": lambda folder: Synthetic(count=50),
    "clicks": lambda folder: Clicks(count=50, held_out=20),
    "arrays": arrays,
    "images": image_files,
    "shards": image_shards,
}


def records(folder):
    """Prompts with completions, of which some are longer than a row."""
    rows = [{"prompt": text[: len(text) // 2], "completion": text[len(text) // 2 :]} for text in stories(90)]
    (folder / "r.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return JsonLines(folder / "r.jsonl")


@pytest.fixture(params=[*SOURCES, "records"])
def source(request, tmp_path) -> Source | RowSource:
    folder = tmp_path / "source"
    folder.mkdir()
    return (EXAMPLES | {"records": records})[request.param](folder)


@pytest.fixture(params=["split", "fit"])
def settings(request, tmp_path) -> DataSettings:
    return DataSettings(
        sequence=SEQUENCE, batch=BATCH, packing=request.param, held_out=0.2, cache=str(tmp_path / "cache")
    )


def batches(settings, source, process=0, processes=1, seed=1, make=build) -> Batches:
    options = {"vocab": 258}
    if isinstance(source, Clicks):
        options = {"vocab": (40, 20), "fields": CLICK_FIELDS}
    if isinstance(source, ImageArrays | ImageFolder | ImageShards):
        options = {"vocab": ImageSpace(3, 1, 5), "fields": IMAGE_FIELDS}
    return make(settings, Bytes(), **options, seed=seed, process=process, processes=processes, source=source)


def take(stream: Batches, count: int | None = None) -> list[list[tuple]]:
    """The next batches as lists of rows, each a tuple of everything in it."""
    return [rows_of(batch) for batch in islice(stream, count)]


def rows_of(batch: Batch) -> list[tuple]:
    assert set(batch) in ({"tokens", "targets", "segments", "mask"}, set(CLICK_FIELDS), set(IMAGE_FIELDS))
    (count,) = {array.shape if "tokens" in batch else len(array) for array in batch.values()}
    rows = range(count if isinstance(count, int) else count[0])
    return [tuple(tuple(np.ravel(batch[name][row]).tolist()) for name in batch) for row in rows]


def flat(batches: list[list[tuple]]) -> list[tuple]:
    return [row for batch in batches for row in batch]


def epoch_rows(settings, source) -> int:
    """Rows of one epoch: unshuffled ones, until the first comes back."""
    rows = flat(take(batches(settings.model_copy(update={"shuffle": False}), source), 200))
    period = next(i for i in range(1, 800) if rows[i : i + 800] == rows[:800])
    assert 8 < period < 400
    return period


def test_every_source_has_an_example():
    assert set(EXAMPLES) == set(SOURCES)


def test_deterministic_and_moved_by_the_seed(source, settings):
    first = take(batches(settings, source), 20)
    assert take(batches(settings, source), 20) == first
    assert take(batches(settings, source, seed=2), 20) != first


def test_restorable_at_any_position(source, settings):
    whole = take(batches(settings, source), 30)
    stream, restored = batches(settings, source), batches(settings, source)
    for position in range(12):
        state = json.loads(json.dumps(stream.state()))
        restored.restore(state)
        assert take(restored, 3) == whole[position : position + 3]
        assert take(stream, 1) == [whole[position]]


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_shards_are_disjoint_and_complete(source, settings, processes):
    whole = take(batches(settings, source), 12)
    parts = [take(batches(settings, source, process, processes), 12) for process in range(processes)]
    for step, batch in enumerate(whole):
        assert flat([part[step] for part in parts]) == batch


def test_a_position_moves_between_any_numbers_of_processes(source, settings):
    whole, step, state = take(batches(settings, source), 30), 0, None
    for processes in (4, 2, 8, 1, 4):
        shards = [batches(settings, source, process, processes) for process in range(processes)]
        if state:
            for shard in shards:
                shard.restore(state)
        for _ in range(5):
            assert flat([flat(take(shard, 1)) for shard in shards]) == whole[step]
            step += 1
        assert all(shard.state() == shards[0].state() for shard in shards)
        state = shards[-1].state()


def test_epochs_hold_the_same_rows_in_another_order(source, settings):
    rows = epoch_rows(settings, source)
    seen = flat(take(batches(settings, source), 3 * rows // BATCH + 3))
    epochs = [seen[i * rows : (i + 1) * rows] for i in range(3)]
    plain = flat(take(batches(settings.model_copy(update={"shuffle": False}), source), rows // BATCH + 1))[:rows]
    for before, after in pairwise([plain, *epochs]):
        assert Counter(before) == Counter(after)
        assert before != after


def test_held_out_rows_are_fixed_and_apart(source, settings):
    held_out = batches(settings, source, make=eval_batches)
    first = take(held_out)
    held_out.rewind()
    assert take(held_out) == first
    in_order = settings.model_copy(update={"shuffle": False})
    trained = set(flat(take(batches(in_order, source), epoch_rows(settings, source) // BATCH + 1)))
    assert first
    assert not trained & set(flat(first))
    parts = [take(batches(settings, source, process, 4, make=eval_batches)) for process in range(4)]
    assert [flat([part[step] for part in parts]) for step in range(len(first))] == first
