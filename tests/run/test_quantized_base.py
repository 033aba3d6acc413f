"""Adapters on a folder in few bits: the base stays in the codes of the file, in training, on resuming, and when the run is loaded."""

import json

import numpy as np
import pytest
from helpers import relative, stories_model, stories_text

import argosy
from argosy.adapt.quant import QuantizedEinsum
from argosy.adapt.rules import preset_rules
from argosy.adapt.surgery import find
from argosy.jobs.convert import convert
from argosy.jobs.quantize import quantize
from argosy.jobs.train import Quiet

# Each trains several models.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """stories260K in w4, and the floats of its codes."""
    root = tmp_path_factory.mktemp("base")
    quantize(str(stories_model()), root / "w4", preset_rules("w4"))
    convert(str(root / "w4"), root / "floats", "hub", None)
    return root


def train(model, folder, steps, *words):
    text = stories_text()
    common = ["adapter.rank=2", f"data.source={text}", "data.max_bytes=20000", "data.sequence=32", "data.batch=8", "log.every=1"]
    common += ["data.held_out=0", "eval.batches=0", "checkpoint.every=2", f"dir={folder}", f"steps={steps}", f"model={model}"]
    argosy.fit("pretrain", *common, *words, view=Quiet())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def bases(lm):
    return {name: getattr(of, "of", of) for name, of in find(lm.module, r"layers\..*").items()}


def test_adapters_train_on_the_codes_of_a_folder(folders, tmp_path):
    codes = train(folders / "w4", tmp_path / "codes", 2, "adapter=lora")
    floats = train(folders / "floats", tmp_path / "floats", 2, "adapter=lora")
    assert codes == pytest.approx(floats, rel=1e-5)
    lm, other = argosy.load(tmp_path / "codes"), argosy.load(tmp_path / "floats")
    stored = bases(argosy.load(folders / "w4"))
    for name, of in bases(lm).items():
        assert isinstance(of, QuantizedEinsum)
        np.testing.assert_array_equal(np.asarray(of.values[...]), np.asarray(stored[name].values[...]))
    assert not any(isinstance(of, QuantizedEinsum) for of in bases(other).values())
    tokens = np.arange(3, 40)
    assert relative(lm.logits(tokens), other.logits(tokens)) < 1e-4
    assert relative(lm.logits(tokens), argosy.load(folders / "w4").logits(tokens)) > 1e-4


def test_as_a_hub_folder_the_run_is_the_same_model(folders, tmp_path):
    train(folders / "w4", tmp_path / "codes", 2, "adapter=lora", "optimizer.learning_rate=1e-2")
    convert(str(tmp_path / "codes"), tmp_path / "merged", "hub", None)
    tokens = np.arange(3, 40)
    assert relative(argosy.load(tmp_path / "merged").logits(tokens), argosy.load(tmp_path / "codes").logits(tokens)) < 1e-4


def test_a_run_on_codes_resumes_bit_for_bit(folders, tmp_path):
    whole = train(folders / "w4", tmp_path / "whole", 4, "adapter=lora")
    train(folders / "w4", tmp_path / "parts", 2, "adapter=lora", "schedule=constant")
    resumed = train(folders / "w4", tmp_path / "parts", 4, "adapter=lora", "schedule=constant")
    steady = train(folders / "w4", tmp_path / "steady", 4, "adapter=lora", "schedule=constant")
    assert resumed == steady
    assert whole.keys() == steady.keys()


def test_what_needs_floats_gets_them(folders, tmp_path):
    """DoRA reads the norms of the weights, and PiSSA their singular vectors; both start from the base."""
    first = train(folders / "w4", tmp_path / "lora", 1, "adapter=lora")[1]
    for name, words in {"dora": ["adapter=dora"], "pissa": ["adapter=lora", "adapter.init=pissa"]}.items():
        assert train(folders / "w4", tmp_path / name, 1, *words)[1] == pytest.approx(first, rel=1e-4)
    assert not any(isinstance(of, QuantizedEinsum) for of in bases(argosy.load(tmp_path / "dora")).values())
