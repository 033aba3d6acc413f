"""The weights of the small reference models, drawn again from what a golden says of each tensor: shape, mean, deviation.

Goldens hold no weights, only how to draw them: a hundred models in two megabytes. NumPy alone, so that the reference
implementation's environment and the suite's draw the same; a digest says if they ever do not.
"""

import hashlib
import json
import shutil
import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

# Contexts in tokens to load a model with, where its own differs from what the golden was made with: the reference takes LongRoPE's
# short table for a sequence within the original context.
CONTEXTS = {"phi3-short": 50}


def draw_weights(tensors: dict[str, list], seed: int) -> dict[str, np.ndarray]:
    """{name: [shape, mean, deviation]} as float32 arrays. Each tensor has a stream of its own name, or of the name that
    follows: a copy."""
    out = {}
    for name, (shape, mean, deviation, *source) in tensors.items():
        noise = np.random.default_rng([seed, zlib.crc32((source or [name])[0].encode())]).standard_normal(shape)
        out[name] = np.ascontiguousarray(mean + deviation * noise, np.float32).reshape(shape)
    return out


def digest(weights: dict[str, np.ndarray]) -> str:
    whole = hashlib.sha256()
    for name in sorted(weights):
        whole.update(name.encode() + weights[name].tobytes())
    return whole.hexdigest()


def write_pipeline(golden: Path, folder: Path) -> Path:
    """The folder of diffusers that a golden of a whole pipeline is about."""
    folder.mkdir(parents=True)
    shutil.copyfile(golden / "model_index.json", folder / "model_index.json")
    for part in sorted(path for path in golden.iterdir() if path.is_dir()):
        if not (part / "tensors.json").is_file():
            shutil.copytree(part, folder / part.name)
            continue
        write_model(part, folder / part.name)
        if not part.name.startswith("text_encoder"):
            (folder / part.name / "model.safetensors").rename(folder / part.name / "diffusion_pytorch_model.safetensors")
    return folder


def write_model(golden: Path, folder: Path) -> Path:
    """The Hub folder that a golden is about."""
    description = json.loads((golden / "tensors.json").read_text(encoding="utf-8"))
    weights = draw_weights(description["tensors"], description["seed"])
    assert digest(weights) == description["sha256"], f"{golden.name}: the drawn weights are not those of the golden"
    folder.mkdir(parents=True)
    shutil.copyfile(golden / "config.json", folder / "config.json")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
