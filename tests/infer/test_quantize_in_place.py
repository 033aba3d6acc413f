"""`lm.quantize(..., method=..., data=...)` writes into a model in memory what `argosy quantize` writes into a folder."""

import json

import numpy as np
import pytest
from helpers import relative, stories_model, stories_text

from argosy.adapt.methods.settings import GPTQ, METHODS
from argosy.adapt.quant import QuantizedEinsum
from argosy.adapt.rules import preset_rules
from argosy.adapt.surgery import at
from argosy.core.errors import ArgosyError
from argosy.data.settings import DataSettings
from argosy.infer.load import load_lm
from argosy.jobs.quantize import quantize
from argosy.models.parts.stack import Scan, Unroll

SEQUENCE, SAMPLES = 32, 24


def texts():
    return [part for part in stories_text().read_text(encoding="utf-8").split("\n\n") if len(part) > 200][:80]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts()))
    return file


@pytest.mark.parametrize(
    ("method", "layout"),
    [
        pytest.param("gptq", Scan(), id="gptq-scan"),
        *(
            pytest.param(method, layout_of, id=f"{method}-{type(layout_of).__name__}", marks=pytest.mark.slow)
            for method in ("mse", "awq")
            for layout_of in (Unroll(), Scan())
        ),
    ],
)
def test_a_model_in_memory_becomes_what_the_folder_holds(method, layout, data, tmp_path):
    stories, data_of = stories_model(), {"source": str(data), "sequence": SEQUENCE}
    quantize(
        str(stories), tmp_path / "out", preset_rules("w4a8"), method=METHODS[method](), data=DataSettings(**data_of), samples=SAMPLES
    )
    expected, lm = load_lm(tmp_path / "out"), load_lm(stories, run=layout)
    tokens = np.asarray(lm.tokenizer.encode(texts()[0]))[:48]
    plain = lm.logits(tokens)
    names = lm.quantize("w4a8", method=method, data=data_of, samples=SAMPLES)
    assert len(names) > 5
    assert all(isinstance(at(lm.module, name), QuantizedEinsum) for name in names)
    logits = lm.logits(tokens)
    assert relative(logits, expected.logits(tokens)) < 1e-4
    assert relative(logits, plain) > 1e-3
    lm.save(tmp_path / "saved", format="argosy")
    assert relative(load_lm(tmp_path / "saved").logits(tokens), logits) < 1e-4


def test_gptq_loses_less_than_nearest_and_takes_texts():
    loss = {}
    for name, options in (
        ("nearest", {}),
        ("mse", {"method": "mse"}),
        ("gptq", {"method": GPTQ(damping=0.05), "data": texts()[:-8], "samples": 12}),
    ):
        lm = load_lm(stories_model())
        lm.quantize("w4", **options)
        loss[name] = -np.concatenate(lm.score(texts()[-8:])).mean()
    assert max(loss["gptq"], loss["mse"]) < loss["nearest"]


def test_static_scales_come_from_data(data):
    lm = load_lm(stories_model())
    names = lm.quantize("w8a8-static", data={"source": str(data), "sequence": SEQUENCE}, samples=8)
    scales = {float(np.ravel(at(lm.module, name).x_scale[...])[0]) for name in names}
    assert len(scales) > 5
    assert 1.0 not in scales


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"method": "gptq"}, "needs calibration data"),
        ({"method": "gtpq"}, "gptq"),
        ({"method": "gptq", "data": "nowhere.jsonl"}, "nowhere"),
        ({"method": "gptq", "data": ["short"], "samples": 4}, "fewer than samples=4"),
        ({"method": "mse", "data": {"sauce": "x"}}, "sauce"),
    ],
)
def test_mistakes_leave_the_model_as_it_was(options, problem):
    lm = load_lm(stories_model())
    before = lm.module.layers
    with pytest.raises(ArgosyError, match=problem):
        lm.quantize("w4", **options)
    assert lm.module.layers is before
    lm.quantize("w4")
    with pytest.raises(ArgosyError, match="quantized already"):
        lm.quantize("w8", method="mse")
