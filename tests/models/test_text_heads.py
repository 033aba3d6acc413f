"""Heads of scores over whole texts against transformers' ForSequenceClassification: scores, losses, and the folders that hold them."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from golden_weights import digest, draw_weights
from helpers import relative
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import argosy
from argosy.export.bundle import Bundle
from argosy.infer.classify import scores_of
from argosy.models.parts.texts import pair_types, text_places, text_scores
from argosy.train.objectives.texts.classify import Classify, classification_loss

GOLDEN = json.loads((Path(__file__).parents[1] / "goldens" / "texts.json").read_text(encoding="utf-8"))
MODELS = GOLDEN["models"]
# Float32 sums in another order, after two layers.
TOLERANCE = 4.4e-5


@pytest.fixture(params=MODELS)
def case(request, tmp_path):
    """A golden, and its Hub folder."""
    golden, folder = MODELS[request.param], tmp_path / "hub"
    weights = draw_weights(golden["tensors"], GOLDEN["seed"])
    assert digest(weights) == golden["sha256"]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(golden["config"]))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return golden, folder


def scores_by(lm, golden) -> np.ndarray:
    """The scores of the golden's texts in one padded batch."""
    tokens, lengths = jnp.asarray(golden["ids"], jnp.int32), np.array(golden["lengths"])
    segments = jnp.asarray(np.arange(tokens.shape[1]) < lengths[:, None], jnp.int32)
    second = jnp.asarray(golden["seconds"], jnp.float32)[:, None]
    types = None if lm.config.causal else pair_types(lm.config.attend(segments).positions, segments, second)
    return np.asarray(text_scores(lm.module, tokens, segments, types)[0][:, 0])


def test_scores_equal_those_of_transformers(case):
    golden, folder = case
    lm = argosy.load(folder)
    assert lm.config.scored == 3
    assert relative(scores_by(lm, golden), golden["logits"]) < TOLERANCE


def test_a_saved_folder_holds_the_same_tensors(case, tmp_path):
    golden, folder = case
    argosy.load(folder).save(tmp_path / "again", format="hub")
    was, now = load_file(folder / "model.safetensors"), load_file(tmp_path / "again" / "model.safetensors")
    assert {name for name in was if "position_ids" not in name} == set(now)
    for name, value in now.items():
        np.testing.assert_array_equal(was[name], value, err_msg=name)
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["architectures"] == golden["config"]["architectures"]


@pytest.mark.parametrize("problem", ["single_label_classification", "multi_label_classification"])
@pytest.mark.parametrize("name", MODELS)
def test_losses_equal_those_of_transformers(name, problem):
    golden = MODELS[name]
    scores = jnp.asarray(golden["logits"], jnp.float32)[:, None]
    label = np.asarray(golden["labels"][problem], np.float32).reshape(len(scores), 1, -1)
    loss = classification_loss(Classify(), scores, jnp.asarray(label), jnp.ones((len(scores), 1)), problem, ("a", "b", "c"))
    assert float(loss.loss.value()) == pytest.approx(golden["losses"][problem], rel=1e-5)


def test_a_cross_encoder_of_roberta_reads_pairs_as_its_tokenizer_frames_them(tmp_path):
    """`<s> a </s></s> b </s>` by the tokenizers library; in Python, as a bundle, and cut to the context."""
    golden = MODELS["roberta"]
    weights = draw_weights(golden["tensors"], GOLDEN["seed"])
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text(json.dumps(golden["config"]))
    save_file(weights, tmp_path / "folder" / "model.safetensors", metadata={"format": "pt"})
    words = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3} | {f"w{i}": 4 + i for i in range(109)}
    library = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>"])
    library.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    library.save(str(tmp_path / "folder" / "tokenizer.json"))
    roles = {"bos_token": "<s>", "cls_token": "<s>", "sep_token": "</s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (tmp_path / "folder" / "tokenizer_config.json").write_text(json.dumps(roles))
    lm = argosy.load(tmp_path / "folder")
    pairs = [("w1 w2 w3", "w4 w5"), ("w6", "w7 w8 w9 w10"), ("w1 " * 60, "w2 " * 60)]
    library.enable_truncation(lm.config.context)
    expected = []
    for pair in pairs:
        ids = jnp.asarray([library.encode(*pair).ids], jnp.int32)
        expected.append(np.asarray(text_scores(lm.module, ids, jnp.ones_like(ids))[0][0, 0]))
    assert relative(scores_of(lm, pairs, 2), np.stack(expected)) < 1e-5
    lm.export(tmp_path / "bundle", platforms=["cpu"])
    columns = dict(zip(("text", "text_pair"), map(list, zip(*pairs))))
    assert relative(Bundle.open(tmp_path / "bundle").run(columns)["scores"], np.stack(expected)) < 1e-5


def test_packed_texts_score_as_they_do_alone(case):
    """Two texts in a row, and a slot that is empty."""
    golden, folder = case
    lm, ids, lengths = argosy.load(folder), np.array(golden["ids"]), golden["lengths"]
    row = np.concatenate([ids[0, : lengths[0]], ids[1, : lengths[1]], np.full(5, 1)])
    segments = np.repeat([1, 2, 0], [lengths[0], lengths[1], 5])[None]
    second = jnp.asarray([[golden["seconds"][0], 0, 0]], jnp.float32)
    tokens, segments = jnp.asarray(row[None], jnp.int32), jnp.asarray(segments, jnp.int32)
    types = None if lm.config.causal else pair_types(lm.config.attend(segments).positions, segments, second)
    logits = np.asarray(text_scores(lm.module, tokens, segments, types, slots=3)[0])[0, :2]
    assert relative(logits, np.asarray(golden["logits"])[:2]) < TOLERANCE


def test_places_of_texts_in_a_row():
    segments = jnp.asarray([[1, 1, 2, 2, 2, 0], [1, 0, 0, 0, 0, 0]])
    assert text_places(segments, 2, last=True).tolist() == [[1, 4], [0, 0]]
    assert text_places(segments, 2, last=False).tolist() == [[0, 2], [0, 0]]


def test_figures_of_classes_are_exact_over_batches():
    """F1, shares and the accuracy of the most frequent class, against counts by hand; empty slots count nowhere."""
    from argosy.train.objectives.loss import WeightedMean

    scores = jnp.asarray([[[2.0, 0, 1]], [[0, 3, 1]], [[5, 0, 0]], [[0, 1, 9]], [[9, 0, 0]]])
    label = jnp.asarray([[[0.0]], [[1]], [[1]], [[2]], [[2]]])
    live = jnp.asarray([[1.0], [1], [1], [1], [0]])
    parts = [
        classification_loss(Classify(), scores[at], label[at], live[at], None, ("a", "b", "c")).metrics
        for at in (slice(0, 2), slice(2, 5))
    ]
    figures = {name: float(WeightedMean.value(parts[0][name] + parts[1][name])) for name in parts[0]}
    # a: found twice, right once, there once; b: found once, right, there twice; c: found and there once.
    expected = {"accuracy": 3 / 4, "f1/a": 2 / 3, "f1/b": 2 / 3, "f1/c": 1, "share/a": 1 / 4, "share/b": 2 / 4, "share/c": 1 / 4}
    assert figures == pytest.approx(expected)
    assert Classify().derived(figures) == pytest.approx({"f1_macro": (2 / 3 + 2 / 3 + 1) / 3, "majority_accuracy": 1 / 2})


def test_regression_is_the_squared_difference():
    scores, label = jnp.asarray([[[2.0]], [[1.0]]]), jnp.asarray([[[0.5]], [[3.0]]])
    loss = classification_loss(Classify(), scores, label, jnp.ones((2, 1)), None, ("LABEL_0",))
    assert float(loss.loss.value()) == pytest.approx((1.5**2 + 2**2) / 2)
    assert float(loss.metrics["mae"].value()) == pytest.approx((1.5 + 2) / 2)
