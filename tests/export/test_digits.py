"""The example of a foreign Flax module: trained on real digits, exported, and served where its code cannot be imported."""

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from bundle_files import run_alone
from helpers import shared
from predict.predict_servers import serving

from argosy.core.formats.image_files import image_file

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
EXAMPLE = Path(__file__).parents[2] / "examples" / "digits.py"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["convolution", "mlp"])
def test_digits_are_learned_exported_and_served(tmp_path: Path, kind: str):
    file = shared("images/digits_8x8.npz")
    # In a process of its own, without the strict promotion of the tests.
    env = {name: value for name, value in os.environ.items() if not name.startswith("JAX_NUMPY")}
    words = [str(EXAMPLE), str(file), str(tmp_path / "models" / "digits" / "1"), kind]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    accuracy = float(done.stdout.split("%")[0]) / 100
    assert accuracy > 0.85, "a tenth are right by chance"
    with np.load(file) as data:
        images, labels = data["images"][-360:], data["labels"][-360:]
    (alone,) = run_alone([{"bundle": tmp_path / "models" / "digits" / "1", "inputs": {"image": images}}], tmp_path)
    assert np.mean(alone["digit"] == labels) == pytest.approx(accuracy, abs=0.01)
    with serving(tmp_path / "models") as (address, _), httpx.Client(base_url=address, timeout=60) as client:
        body: dict[str, Any] = {"instances": [{"image": image.tolist()} for image in images[:40]]}
        predictions = client.post("/v1/models/digits:predict", content=json.dumps(body)).json()["predictions"]
        assert [prediction["digit"] for prediction in predictions] == alone["digit"][:40].tolist()
        files = [image_file((np.repeat(image[..., None], 3, -1) * (255 / 16)).astype(np.uint8)) for image in images[:40]]
        instances = [{"image_file": {"b64": base64.b64encode(file).decode()}} for file in files]
        of_files = client.post("/v1/models/digits:predict", content=json.dumps({"instances": instances})).json()["predictions"]
        assert [prediction["digit"] for prediction in of_files] == alone["digit"][:40].tolist()
        assert of_files[0]["label"] == NAMES[alone["digit"][0]]
        assert predictions[0]["scores"] == pytest.approx(alone["scores"][0].tolist(), abs=1e-5)
