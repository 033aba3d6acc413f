"""A classifier from its records to its answers over HTTP: training, evaluation, a Hub folder, a bundle, vLLM's and others' routes."""

import json
from pathlib import Path

import httpx
import numpy as np
import pytest
from helpers import Heard
from predict_servers import serving

import argosy
from argosy.core.errors import BadInput, UserError
from argosy.core.storage import Store
from argosy.export.bundle import Bundle
from argosy.models.bert import BertConfig
from argosy.observe.metrics import read
from argosy.weights.build import random_model

WORDS = {"sea": "ship wave salt boat", "field": "plow corn barn horse"}
SMALL = ["data.sequence=32", "data.batch=16", "data.held_out=0.2", "optimizer.learning_rate=2e-2", "eval.every=1000", "data.epochs=99"]


@pytest.fixture(scope="module")
def records(tmp_path_factory) -> Path:
    """Texts of words of two kinds, of which one has twice as many."""
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("data") / "texts.jsonl"
    rows = []
    for i in range(150):
        label = "sea" if i % 3 else "field"
        rows.append({"text": " ".join(rng.choice(WORDS[label].split(), 4)), "label": label})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(records: Path, run: Path, *words: str, steps: int = 24) -> str:
    heard = Heard()
    words_of_run = [*SMALL, f"data.source={records}", f"dir={run}", f"data.cache={run.parent / 'cache'}", "mesh.data=1"]
    argosy.fit("classify", *words_of_run, *words, view=heard, steps=steps)
    return heard.words


SIZES = ["model.vocab=258", "model.width=32", "model.layers=1", "model.ffn=64", "model.heads=2", "model.context=64"]
LLAMA = ["model.family=llama", *SIZES]


@pytest.fixture(scope="module")
def run(records, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("classify") / "run"
    train(records, folder, *LLAMA)
    return folder


def test_a_classifier_of_a_decoder_learns_its_classes(run):
    """Its evaluation says how good it is beside the answer that is always the most frequent class."""
    last = [line for line in read(Store(run)) if "eval_loss" in line][-1]
    assert 0.5 < last["eval_majority_accuracy"] < 0.85
    assert last["eval_accuracy"] > 0.95
    assert last["eval_f1/sea"] > 0.95
    assert last["eval_f1_macro"] == pytest.approx((last["eval_f1/sea"] + last["eval_f1/field"]) / 2)
    lm = argosy.load(run)
    assert lm.config.labels == ("field", "sea")
    assert lm.config.problem_type == "single_label_classification"
    labels = lm.classify(["wave salt", "corn barn"])
    assert [max(scores, key=scores.get) for scores in labels] == ["sea", "field"]
    with pytest.raises(BadInput, match="scores sequences"):
        lm.generate(["wave"])


def test_a_classifier_goes_to_the_hub_and_back_and_trains_on(run, records, tmp_path):
    lm = argosy.load(run)
    lm.save(tmp_path / "hub", format="hub")
    config = json.loads((tmp_path / "hub" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["id2label"] == {"0": "field", "1": "sea"}
    again = argosy.load(tmp_path / "hub")
    texts = ["wave salt", "corn"]
    assert [scores["sea"] for scores in again.classify(texts)] == pytest.approx(
        [scores["sea"] for scores in lm.classify(texts)], rel=1e-5
    )
    # Its head is kept: it knows the classes before the first step of another run.
    output = train(records, tmp_path / "more", f"model={tmp_path / 'hub'}", "eval.before=true", steps=1)
    assert "drawn from the random seed" not in output
    first = next(line for line in read(Store(tmp_path / "more")) if "eval_loss" in line)
    assert first["eval_accuracy"] > 0.95


def test_an_encoder_gets_a_head_and_classifies(records, tmp_path):
    """From a folder without a head; BERT reads its first token, and what is before the head is drawn where the folder lacks it."""
    sizes = {"vocab": 258, "width": 32, "layers": 1, "ffn": 64, "heads": 2, "context": 64, "norm_eps": 1e-5, "pooler": False}
    stored = random_model(BertConfig(**sizes), 0)
    from argosy.infer.lm import LM

    LM(**vars(stored)).save(tmp_path / "bert", format="hub")
    output = train(records, tmp_path / "run", f"model={tmp_path / 'bert'}", "data.tokenizer=byte", steps=16)
    assert "a head of scores takes the place" in output
    last = [line for line in read(Store(tmp_path / "run")) if "eval_loss" in line][-1]
    assert last["eval_accuracy"] > 0.95
    lm = argosy.load(tmp_path / "run")
    with pytest.raises(BadInput, match="is an encoder"):
        lm.rewards(["wave"])
    lm.save(tmp_path / "hub", format="hub")
    assert json.loads((tmp_path / "hub" / "config.json").read_text())["architectures"] == ["BertForSequenceClassification"]
    again = argosy.load(tmp_path / "hub")
    assert again.classify(["corn"])[0]["sea"] == pytest.approx(lm.classify(["corn"])[0]["sea"], rel=1e-5)


def test_labels_and_heads_that_do_not_fit_are_refused(records, run, tmp_path):
    with pytest.raises(UserError, match=r"model.scores = 3, and data.labels names 2 classes"):
        train(records, tmp_path / "a", *LLAMA, "model.scores=3", "data.labels=[field, sea]", steps=1)
    with pytest.raises(BadInput, match="unknown class `field`"):
        train(records, tmp_path / "b", *LLAMA, "data.labels=[sea, sky]", steps=1)
    with pytest.raises(UserError, match="objective=classify trains encoders"):
        argosy.fit("tiny", "model.family=bert", *SIZES, f"dir={tmp_path / 'c'}", steps=1)


def test_a_classifier_is_a_bundle_and_answers_every_protocol(run, tmp_path):
    lm = argosy.load(run)
    lm.export(tmp_path / "repository" / "words" / "1", platforms=["cpu"])
    (tmp_path / "repository" / "words" / "config.yml").write_text("batching: {max_batch_size: 2}\n")
    bundle = Bundle.open(tmp_path / "repository" / "words" / "1")
    assert bundle.manifest.default == "classify"
    texts = ["wave salt", "corn barn"]
    outputs, expected = bundle.run({"text": texts}), lm.classify(texts)
    assert outputs["label"] == ["sea", "field"]
    np.testing.assert_allclose(outputs["probabilities"], [list(scores.values()) for scores in expected], rtol=1e-5)
    with serving(tmp_path / "repository") as (url, _), httpx.Client(base_url=url, timeout=60) as ask:
        answer = ask.post("/classify", json={"model": "words", "input": texts}).json()
        assert [entry["label"] for entry in answer["data"]] == ["sea", "field"]
        assert answer["data"][0]["num_classes"] == 2
        assert answer["usage"]["prompt_tokens"] == sum(map(len, texts))
        np.testing.assert_allclose([entry["probs"] for entry in answer["data"]], outputs["probabilities"], rtol=1e-5)
        alone = ask.post("/v1/classify", json={"input": texts[0]}).json()
        assert alone["data"][0]["label"] == "sea"
        assert ask.post("/classify", json={"model": "no", "input": "x"}).status_code == 404
        assert ask.post("/classify", json={"model": "words", "input": []}).status_code == 400
        wrong = ask.post("/score", json={"model": "words", "text_1": "a", "text_2": "b"})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "wrong_kind_of_model")
        # TensorFlow Serving
        rows = ask.post("/v1/models/words:classify", json={"examples": [{"text": text} for text in texts]}).json()["result"]
        assert [[label for label, _ in row] for row in rows] == [["field", "sea"]] * 2
        np.testing.assert_allclose([[score for _, score in row] for row in rows], outputs["probabilities"], rtol=1e-5)
        assert "regression has one" in ask.post("/v1/models/words:regress", json={"examples": [{"text": "a"}]}).json()["error"]
        assert ask.post("/v1/models/words:classify", json={"examples": []}).status_code == 400
        # Triton's classification extension
        tensor = {"name": "text", "shape": [2], "datatype": "BYTES", "data": texts}
        body = {"inputs": [tensor], "outputs": [{"name": "scores", "parameters": {"classification": 1}}]}
        output = ask.post("/v2/models/words/infer", json=body).json()["outputs"][0]
        assert (output["shape"], output["datatype"]) == ([2, 1], "BYTES")
        for text, row, label in zip(output["data"], outputs["scores"], ("1:sea", "0:field")):
            value, _, rest = text.partition(":")
            assert rest == label
            assert float(value) == pytest.approx(row.max(), abs=1e-5)
        body["outputs"][0]["parameters"]["classification"] = "two"
        assert ask.post("/v2/models/words/infer", json=body).status_code == 400
