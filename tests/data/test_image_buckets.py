"""Aspect-ratio buckets: their sizes are kohya's, batches are of one bucket, every image comes equally often, a run resumes exactly."""

import hashlib
import json
from collections import Counter

import numpy as np
import pytest
from helpers import Heard
from PIL import Image

import argosy
from argosy.core.errors import BadInput
from argosy.core.storage import Store
from argosy.data.batch import Field
from argosy.data.images.buckets import BucketOrder, bucket_sizes, nearest_bucket
from argosy.data.images.settings import ImageSettings
from argosy.data.pipeline import build, eval_batches
from argosy.data.settings import DataSettings
from argosy.models.diffusion.base import ImageSpace
from argosy.observe.metrics import read

# `make_bucket_resolutions((512, 512))` of kohya's sd-scripts (commit 036907ee), and 16 digits of the SHA-256 of others as JSON.
KOHYA_512 = [(256, 832), (256, 896), (256, 960), (256, 1024), (320, 704), (320, 768), (384, 640), (448, 576), (512, 512),
             (576, 448), (640, 384), (704, 320), (768, 320), (832, 256), (896, 256), (960, 256), (1024, 256)]  # fmt: skip
KOHYA = {(1024, 64, 512, 2048): "d2ff8083cbeddfe3", (32, 8, 16, 64): "6cbc2d28d51641a8", (768, 32, 256, 1536): "a271ba750a88d57a"}
FIELDS = {"images": Field("B h w c", np.float32, "row"), "row": Field("B", np.int32, "row")}
SHAPES = {"wide": (20, 32), "square": (24, 24), "high": (42, 18)}


def test_sizes_are_those_of_sd_scripts():
    assert bucket_sizes(512, 64) == KOHYA_512
    for arguments, digest in KOHYA.items():
        assert hashlib.sha256(json.dumps(bucket_sizes(*arguments)).encode()).hexdigest()[:16] == digest
    # Half of 72 is no multiple of 16: sides are, all the same.
    assert all(side % 16 == 0 for size in bucket_sizes(72, 16) for side in size)


def test_ratios_are_compared_by_their_logarithms():
    sizes = [(1, 1), (2, 1), (1, 2)]
    # 3 : 2 is nearer to 2 : 1 than to 1 : 1 by quotients, and as near by differences.
    assert [nearest_bucket(h, w, sizes) for h, w in ((3, 2), (2, 3), (7, 5), (5, 7))] == [1, 2, 0, 0]


@pytest.mark.parametrize("seed", [3, None])
def test_in_as_many_batches_as_images_each_comes_a_batchful_of_times(seed):
    counts, batch = [7, 2, 12], 4
    order = BucketOrder(counts, batch, seed)
    rows = order(np.arange(sum(counts) * batch)).reshape(-1, batch)
    bucket = np.repeat([0, 1, 2], counts)
    assert all(len(set(bucket[row])) == 1 for row in rows)
    assert set(Counter(rows.ravel().tolist()).values()) == {batch}
    for b, count in enumerate(counts):
        bucket_rows = rows[bucket[rows[:, 0]] == b].ravel()
        # A bucket is seen whole before any of its images comes again.
        assert all(len(set(bucket_rows[i : i + count])) == count for i in range(0, len(bucket_rows) - count + 1, count))
        # Batches are evenly spread: none waits for more than twice its turn.
        turns = np.flatnonzero(bucket[rows[:, 0]] == b)
        assert np.diff(turns).max() <= 2 * sum(counts) / count
    for batches in (0, 1, 5, 21, 30):
        drawn_counts = np.bincount(bucket[order(np.arange(batches * batch))], minlength=3)
        assert order.draws(batches).tolist() == drawn_counts.tolist()


def test_an_evaluation_reads_each_image_once():
    order = BucketOrder([7, 2, 12], 4, None, repeats=False)
    rows = order(np.arange(4 * order.batches))
    assert order.batches == 2 + 1 + 3
    assert sorted(rows[rows >= 0].tolist()) == list(range(21))
    bucket = np.repeat([0, 1, 2], [7, 2, 12])
    for some in rows.reshape(-1, 4):
        assert len({int(bucket[row if row >= 0 else -1 - row]) for row in some}) == 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Seven wide images, two squares and twelve high ones."""
    root, draw = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    (root / "a").mkdir()
    for i, name in enumerate(["wide"] * 7 + ["square"] * 2 + ["high"] * 12):
        Image.fromarray(draw.integers(0, 256, (*SHAPES[name], 3), np.uint8)).save(root / "a" / f"{i:02}.png")
    return root


def batches_of(folder, make=build, held_out=0.0, batch=4, **options):
    image = ImageSettings(size=16, buckets=4, **options.pop("image", {}))
    settings = DataSettings(source=str(folder), batch=batch, sequence=1, held_out=held_out, image=image)
    return make(settings, None, vocab=ImageSpace(3, 4, 0), seed=5, fields=FIELDS, **options)


def test_images_are_resized_to_cover_their_bucket_and_cropped(folder):
    batches = batches_of(folder)
    seen = {}
    for _ in range(21):
        batch = next(batches)
        for image, row in zip(batch["images"], batch["row"].tolist()):
            seen[row] = np.rint((image + 1) * 127.5).astype(np.uint8)
    assert len(seen) == 21
    assert Counter(image.shape[:2] for image in seen.values()) == {(12, 20): 7, (16, 16): 2, (24, 8): 12}
    assert [(bucket["h"], bucket["w"]) for bucket in batches.buckets] == [(16, 16), (12, 20), (24, 8)]
    # Buckets are in the order of their heights, images in that of their names.
    with Image.open(folder / "a" / "00.png") as wide:
        expected = np.array(wide.resize((20, 12), Image.Resampling.LANCZOS))
        # 20 x 32 covers 12 x 20 at 12.5 x 20.
        np.testing.assert_array_equal(seen[0], expected)
    with Image.open(folder / "a" / "09.png") as high:
        expected = np.array(high.resize((10, 24), Image.Resampling.LANCZOS))[:, 1:9]
        np.testing.assert_array_equal(seen[9], expected)
    batches.close()


def test_processes_share_a_batch_and_any_position_is_found_again(folder):
    whole, image = batches_of(folder, image={"flip": True}), {"flip": True}
    stream_batches = [next(whole) for _ in range(30)]
    shares = [batches_of(folder, image=image, process=i, processes=2) for i in range(2)]
    for batch in stream_batches[:8]:
        parts = [next(share) for share in shares]
        for name in batch:
            np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), batch[name])
    state = json.loads(json.dumps(shares[1].state()))
    again = batches_of(folder, image=image)
    again.restore(state)
    for batch in stream_batches[8:]:
        np.testing.assert_array_equal(next(again)["images"], batch["images"])
    for stream in (whole, *shares, again):
        stream.close()


def test_held_out_images_are_padded_by_bucket(folder):
    evals = batches_of(folder, eval_batches, held_out=0.4, batch=4)
    rows, shapes = [], set()
    for batch in evals:
        rows += batch["row"].tolist()
        shapes.add(batch["images"].shape[1:3])
        assert not batch["images"][batch["row"] < 0].any()
    held_rows = [row for row in rows if row >= 0]
    assert sorted(held_rows) == list(range(len(held_rows)))
    assert len(held_rows) < len(rows)
    assert shapes <= {(12, 20), (16, 16), (24, 8)}
    evals.close()


def test_what_waits_is_said(folder):
    batches = batches_of(folder)
    text = batches.summary(3).text
    assert "24 x 8 (12 images, " in text
    assert "Fewer images than a batch of 4, so that a batch holds some of them again: 16 x 16." in text
    seen = {row for _ in range(3) for row in next(batches)["row"].tolist()}
    assert f"no further batch in this run: {21 - len(seen)} images." in text
    assert "no further batch" not in batches.summary(21).text
    batches.close()


def test_buckets_that_do_not_fit_are_named(folder, tmp_path):
    with pytest.raises(BadInput, match=r"data\.image\.buckets needs the size of a square image"):
        build(DataSettings(source=str(folder), image=ImageSettings(buckets=4)), None, vocab=ImageSpace(3, 4, 0), seed=0)
    np.savez(tmp_path / "a.npz", images=np.zeros((4, 8, 8), np.uint8) + np.uint8(200))
    array = DataSettings(source=str(tmp_path / "a.npz"), image=ImageSettings(size=8, buckets=4))
    with pytest.raises(BadInput, match=r"data\.image\.buckets is for image files"):
        build(array, None, vocab=ImageSpace(1, 4, 0), seed=0)
    with pytest.raises(BadInput, match="do not divide into the model's patches of 8") as caught:
        build(DataSettings(source=str(folder), image=ImageSettings(size=16, buckets=4)), None, vocab=ImageSpace(3, 8, 0), seed=0)
    assert "data.image.buckets=8" in str(caught.value.hint)


def test_settings_without_buckets_resume_older_runs():
    assert set(ImageSettings().fingerprint()) == {"image.size", "image.crop", "image.flip", "image.invalid", "image.white"}
    assert ImageSettings(size=8, buckets=4).fingerprint()["image.buckets"] == 4


@pytest.mark.slow
def test_a_run_in_buckets_resumes_bit_for_bit(folder, tmp_path):
    sizes = {"channels": 3, "size": 16, "patch": 4, "width": 16, "layers": 1, "heads": 2, "classes": 1}
    words = [f"model.{name}={value}" for name, value in sizes.items()]
    words += [f"data.source={folder}", "data.image.size=16", "data.image.buckets=4"]
    words += ["data.batch=8", "data.held_out=0.3", "eval.every=3", "eval.batches=4", "log.every=1"]
    words += ["schedule=constant", "checkpoint.every=2"]
    for steps in (4, 10):
        argosy.fit("diffusion", *words, f"dir={tmp_path / 'halves'}", view=Heard(), steps=steps)
    argosy.fit("diffusion", *words, f"dir={tmp_path / 'whole'}", view=Heard(), steps=10)
    logs = [list(read(Store(tmp_path / name))) for name in ("halves", "whole")]
    losses = [[line["loss"] for line in log if "loss" in line] for log in logs]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 10
    assert logs[0][-1].get("eval_loss") == logs[1][-1].get("eval_loss")
