"""Weights of tokens from a column: what the loss sees is what the file says, however documents are packed."""

import json
import random

import data_files
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relative
from test_prepare import Bytes

from argosy.core.errors import ArgosyError, BadInput
from argosy.data.chat import template as chat
from argosy.data.encoding import Encoding
from argosy.data.pipeline import build, find
from argosy.data.prepare import open_prepared, prepare
from argosy.data.settings import DataSettings
from argosy.models.llama import LlamaConfig
from argosy.models.parts.attention.attend import Packed
from argosy.models.parts.stack import Unroll
from argosy.models.parts.weight import put, split
from argosy.train.objectives.next_token import NextToken

COLUMN = {"weights": "w"}


@pytest.fixture(scope="module", autouse=True)
def end_children():
    yield
    chat.close_all()


def weight_of(byte: int) -> float:
    return (byte % 5) / 2


def texts(count: int = 60) -> list[dict]:
    """Texts with a weight for each byte, which tells the byte."""
    draw = random.Random(4)
    rows = [f"{number}: " + "".join(draw.choices("abcdef ", k=draw.randint(3, 40))) for number in range(count)]
    return [{"text": text, "w": [weight_of(byte) for byte in text.encode()]} for text in rows]


def settings_for(path, **fields) -> DataSettings:
    defaults = {"sequence": 32, "batch": 4, "held_out": 0, "epochs": 1, "columns": COLUMN, "cache": str(path.parent / "cache")}
    return DataSettings(source=str(path), **defaults | fields)


def batches(settings: DataSettings) -> list[dict]:
    return list(build(settings, Bytes(), vocab=258, seed=0))


@pytest.mark.parametrize("packing", ["split", "fit", "alone"])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows.csv"])
def test_every_target_has_the_weight_of_its_token(tmp_path, packing, name):
    rows = texts()
    cells = [{"text": row["text"], "w": json.dumps(row["w"])} for row in rows] if name == "rows.csv" else rows
    (tmp_path / name).write_bytes(data_files.KINDS[name](cells))
    count = 0
    for batch in batches(settings_for(tmp_path / name, packing=packing, batch=1)):
        tokens, targets, mask, segments = (batch[key][0] for key in ("tokens", "targets", "mask", "segments"))
        for place in np.flatnonzero(segments):
            # The end-of-sequence token has the weight of the last one; the first of the next document is no target.
            of = tokens[place] if targets[place] == 257 else targets[place]
            assert mask[place] == (0 if tokens[place] == 257 else weight_of(of))
            count += 1
    assert count > 1200


def test_all_weights_are_kept_however_rows_are_packed(tmp_path):
    """The sum over all targets is the same number in every packing, and that of the file."""
    (tmp_path / "a.jsonl").write_bytes(data_files.jsonl(rows := texts()))
    expected = sum(sum(row["w"][1:]) + row["w"][-1] for row in rows)
    for packing in ("split", "fit", "alone"):
        stream = batches(settings_for(tmp_path / "a.jsonl", packing=packing, batch=1, sequence=64))
        total = sum(float(batch["mask"].sum()) for batch in stream)
        assert total == pytest.approx(expected, rel=1e-6), packing


def test_the_weighted_loss_is_that_of_each_text_alone(tmp_path):
    """Each text through the model by itself, its log-probabilities weighed by numpy, beside packed rows through the objective."""
    rows = texts(20)
    (tmp_path / "a.jsonl").write_bytes(data_files.jsonl(rows))
    config = LlamaConfig(width=16, layers=2, ffn=24, heads=2, kv_heads=1, vocab=258, context=64)
    model = config.build(Unroll())
    draw = np.random.default_rng(0)
    values = split(model, ...)[1]
    put(model, {name: jnp.asarray(0.3 * draw.standard_normal(value.shape), jnp.float32) for name, value in values.items()})
    logits_of = jax.jit(lambda tokens, segments: model.unembed(model.hidden(tokens, Packed(segments))[0])[0])
    loss_of = jax.jit(lambda batch: NextToken()({"model": model}, batch, jax.random.key(0)).loss)
    total = weight = 0.0
    for row in rows:
        ids = np.array([*row["text"].encode(), 257])
        count = len(ids) - 1
        places = np.arange(64)
        logits = logits_of(jnp.asarray(np.resize(ids, 64)[None] * (places < count)), jnp.asarray(places[None] < count, jnp.int32))
        logits = np.asarray(logits, np.float64)[:count]
        nll = np.log(np.exp(logits).sum(-1)) - logits[np.arange(count), ids[1:]]
        each = np.asarray([*row["w"][1:], row["w"][-1]])
        total, weight = total + float(each @ nll), weight + float(each.sum())
    losses = [loss_of({name: jnp.asarray(array) for name, array in batch.items()})
             for batch in batches(settings_for(tmp_path / "a.jsonl", packing="fit", batch=1, sequence=64))]  # fmt: skip
    assert relative(sum(float(loss.weight) for loss in losses), weight) < 1e-6
    assert relative(sum(float(loss.total) for loss in losses), total) < 1e-5


def chats() -> list[dict]:
    turns = [("user", "{}?"), ("assistant", "No {}."), ("user", "Sure?"), ("assistant", "Yes, {}.")]
    return [{"messages": [{"role": role, "content": text.format(number)} for role, text in turns]} for number in range(12)]


def masks(tmp_path, rows, **fields) -> np.ndarray:
    path = tmp_path / "chats.jsonl"
    path.write_bytes(data_files.jsonl(rows))
    defaults = {"template": "chatml", "packing": "alone", "sequence": 192, "shuffle": False, "batch": 1}
    stream = batches(settings_for(path, **defaults | fields))
    return np.concatenate([batch["mask"] for batch in stream])


def test_a_number_a_message_weighs_its_turn(tmp_path):
    plain = masks(tmp_path, chats(), columns={})
    zeros = [{"messages": [message | ({"weight": 0} if number == 1 else {}) for number, message in enumerate(row["messages"])]}
             for row in chats()]  # fmt: skip
    second = masks(tmp_path, zeros, columns={})
    assert (masks(tmp_path, [row | {"w": [1, 0, 1, 1]} for row in chats()]) == second).all()
    weights = masks(tmp_path, [row | {"w": [9, 0.5, 9, 2]} for row in chats()])
    assert np.array_equal(weights, 0.5 * (plain - second) + 2 * second)
    # A message that does not count at all keeps doing so.
    assert np.array_equal(masks(tmp_path, [row | {"w": [1, 0.5, 1, 2]} for row in zeros]), 2 * second)


def test_a_number_a_record_or_a_token_of_a_chat(tmp_path):
    plain = masks(tmp_path, chats(), columns={})
    assert np.array_equal(masks(tmp_path, [row | {"w": 0.25} for row in chats()]), 0.25 * plain)
    everything = masks(tmp_path, chats(), columns={}, learn="all")
    assert np.array_equal(masks(tmp_path, [row | {"w": 3} for row in chats()], learn="all"), 3 * everything)
    lengths = everything.sum(1).astype(int) + 1
    each = [row | {"w": [0.5 + (n % 3) for n in range(length)]} for row, length in zip(chats(), lengths.tolist())]
    expected = np.stack([[0.5 + ((n + 1) % 3) for n in range(plain.shape[1])]] * len(plain))
    assert np.array_equal(masks(tmp_path, each), (plain * expected).astype(np.float32))


def test_prompts_with_completions(tmp_path):
    rows = [{"prompt": f"{n}+{n}=", "completion": f" {2 * n}", "w": 0.5 + n} for n in range(8)]
    weights = masks(tmp_path, rows, template=None)
    for row, mask in zip(rows, weights):
        # The end of sequence, too, has the completion's weight.
        assert mask[mask > 0].tolist() == [row["w"]] * (len(row["completion"]) + 1)


def test_prepared_folders_hold_them(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(data_files.jsonl(texts()))
    settings = settings_for(tmp_path / "a.jsonl", packing="fit")
    prepare(find(settings), Encoding(Bytes()), tmp_path / "made", held_out=0)
    assert (tmp_path / "made" / "train" / "weights.bin").is_file()
    assert open_prepared(tmp_path / "made").train.weights is not None
    whole, again = (batches(variant) for variant in (settings, settings.model_copy(update={"source": str(tmp_path / "made")})))
    assert all(np.array_equal(a["mask"], b["mask"]) for a, b in zip(whole, again, strict=True))
    with pytest.raises(BadInput, match=r"was prepared with data\.columns"):
        find(DataSettings(source=str(tmp_path / "made"), columns={"weights": "other"}))


WRONG = {
    "no weights in the field `w`: it holds null": [{"text": "ab", "w": [1, 1]}, {"text": "ab", "w": None}],
    "no weights in the field `w`: it holds a text": [{"text": "ab", "w": [1, 1]}, {"text": "ab", "w": "heavy"}],
    "no weights in the field `w`: it holds a list with something else": [{"text": "ab", "w": [1, 1]}, {"text": "ab", "w": [1, -1]}],
    "3 weights for a document of 2 tokens": [{"text": "ab", "w": [1, 1]}, {"text": "ab", "w": [1, 1, 1]}],
    "no column `w`": [{"text": "ab"}],
    "weights of tokens are for texts and conversations": [{"prompt": "a", "chosen": "b", "rejected": "c", "w": 1}],
}


@pytest.mark.parametrize("says", WRONG)
def test_wrong_weights_are_named_with_their_row(tmp_path, says):
    (tmp_path / "a.jsonl").write_bytes(data_files.jsonl(WRONG[says]))
    with pytest.raises(ArgosyError, match=says) as caught:
        batches(settings_for(tmp_path / "a.jsonl", batch=1))
    assert str(caught.value.where).endswith(f"a.jsonl:{len(WRONG[says])}")


def test_wrong_weights_of_chats_are_named(tmp_path):
    with pytest.raises(BadInput, match=r"3 weights for a record of \d+ tokens and 4 messages") as caught:
        masks(tmp_path, [row | {"w": [1, 1, 1]} for row in chats()])
    assert str(caught.value.where).endswith("chats.jsonl:1")
    with pytest.raises(BadInput, match=r"weights of messages, and data\.learn=all"):
        masks(tmp_path, [row | {"w": [1, 1, 1, 1]} for row in chats()], learn="all")
