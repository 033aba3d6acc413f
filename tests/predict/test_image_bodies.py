"""Image files as whole bodies, and as BYTES of the protocol's binary extension: each answers as the bundle does."""

import json
import struct
from pathlib import Path

import httpx
import jax.numpy as jnp
import numpy as np
import pytest
from predict_servers import serving, write_scaled

import argosy
from argosy.core.formats.image_files import image_file
from argosy.export.bundle import Bundle
from argosy.export.steps import DecodeImageStep, LabelsStep, ProbabilitiesStep


def scores(image):
    return {"scores": jnp.stack([image.mean((1, 2, 3)), 1 - image.mean((1, 2, 3))], -1)}


def test_a_body_is_an_image_file(tmp_path: Path):
    steps = [DecodeImageStep(height=6, width=8)]
    after = [ProbabilitiesStep(step="softmax"), LabelsStep(names=["bright", "dark"])]
    args = (jnp.zeros((1, 6, 8, 3)),)
    repository = tmp_path / "models"
    argosy.export(scores, args, repository / "light" / "1", platforms=["cpu"], batch="symbolic", preprocess=steps, postprocess=after)
    write_scaled(repository / "twice" / "1", 2.0)
    files = [image_file(np.full((12, 9, 3), value, np.uint8), kind) for value, kind in ((250, "png"), (5, "jpeg"))]
    expected = Bundle.open(repository / "light" / "1").run({"image_file": files})
    with serving(repository, "warm_up=false") as (address, _), httpx.Client(base_url=f"{address}/v2/models", timeout=60) as client:
        for i, kind in enumerate(("image/png", "Image/JPEG; charset=binary")):
            answer = client.post("/light/infer", content=files[i], headers={"Content-Type": kind})
            outputs = {tensor["name"]: tensor["data"] for tensor in answer.json()["outputs"]}
            assert outputs["label"] == [expected["label"][i]]
            assert outputs["scores"] == pytest.approx(expected["scores"][i].tolist(), rel=1e-5)
        # Triton's raw binary request: the element's bytes, and bytes come back.
        answer = client.post("/light/infer", content=files[1], headers={"Inference-Header-Content-Length": "0"})
        head = json.loads(answer.content[: int(answer.headers["inference-header-content-length"])])
        assert [tensor["name"] for tensor in head["outputs"]] == ["scores", "probabilities", "label"]
        assert answer.content.endswith(struct.pack("<I", 4) + b"dark")
        # The binary extension: two files in one tensor.
        data = b"".join(struct.pack("<I", len(file)) + file for file in files)
        tensor = {"name": "image_file", "shape": [2], "datatype": "BYTES", "parameters": {"binary_data_size": len(data)}}
        head = json.dumps({"inputs": [tensor]}).encode()
        answer = client.post("/light/infer", content=head + data, headers={"Inference-Header-Content-Length": str(len(head))})
        outputs = {tensor["name"]: tensor["data"] for tensor in answer.json()["outputs"]}
        assert outputs["label"] == ["bright", "dark"]
        for body, model, status, why in (
            (files[0][:-40], "light", 400, "no image that can be read"),
            (b"", "light", 400, "no image that can be read"),
            (b"GIF89a plain text", "light", 400, "no image that can be read"),
            (files[0], "twice", 415, "takes no image files"),
        ):
            answer = client.post(f"/{model}/infer", content=body, headers={"Content-Type": "image/png"})
            assert (answer.status_code, why in answer.json()["error"]) == (status, True), answer.text
