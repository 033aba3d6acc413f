"""Small random models of diffusers, with what they answer: `./run reference images [make | check FOLDER] [NAME ...]`.

Runs in an environment of its own, with torch; knows nothing of Argosy. Each golden is a folder as in `make.py`: config.json,
tensors.json (how every tensor is drawn), and golden.npz with inputs and outputs, float32, channels first as diffusers has them.

Notable: every parameter carries noise. Untouched, the gates of adaptive norms are zero, and any block would pass.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import diffusers
import numpy as np
import torch
import transformers
from author_files import SINGLE_FILES, author_golden, author_shapes
from image_models import MODELS
from image_pipelines import PIPELINES, SCHEDULERS, WITHOUT, images_of, learned_images, lora_file, write_tokenizers
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).parents[1]))
from golden_weights import digest, draw_weights

ROOT = Path(__file__).parents[2]
GOLDENS = ROOT / "tests" / "goldens" / "images"
NOISE = 0.05


def class_of(name: str) -> type:
    return getattr(transformers, name, None) or getattr(diffusers, name)


def fresh(kind: str, sizes: dict) -> torch.nn.Module:
    torch.manual_seed(0)
    cls = class_of(kind)
    if issubclass(cls, transformers.PreTrainedModel):
        config = cls.config_class(**sizes)
        config._attn_implementation = "eager"
        return cls(config).eval().float()
    return cls(**sizes).eval().float()


def tensors_of(folder: Path) -> dict[str, list]:
    """{name: [shape, mean, deviation]}: as they were initialized, with noise on what was constant."""
    out = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "np") as opened:
            # How many batches a batch norm saw is no weight.
            for key in sorted(key for key in list(opened.keys()) if not key.endswith("num_batches_tracked")):
                value = opened.get_tensor(key).astype(np.float64)
                spread = max(float(value.std()), NOISE if value.ndim < 2 else 0.15)
                out[key] = [list(value.shape), round(float(value.mean()), 2) if value.ndim < 2 else 0.0, round(min(spread, 1.0), 4)]
    return out


def tensors_and_config(kind: str, sizes: dict) -> tuple[dict[str, list], dict]:
    with tempfile.TemporaryDirectory() as scratch:
        fresh(kind, sizes).save_pretrained(scratch)
        return tensors_of(Path(scratch)), json.loads((Path(scratch) / "config.json").read_text(encoding="utf-8"))


def load(kind: str, sizes: dict, weights: dict[str, np.ndarray]) -> torch.nn.Module:
    """The model with these weights, by the names under which it is saved."""
    from safetensors.numpy import save_file

    with tempfile.TemporaryDirectory() as scratch:
        model = fresh(kind, sizes)
        model.save_pretrained(scratch)
        file = next(Path(scratch).glob("*.safetensors"))
        save_file(weights, file, metadata={"format": "pt"})
        again = class_of(kind).from_pretrained(scratch)
        if hasattr(again.config, "_attn_implementation"):
            # As pipelines run it: of padding before a text, which sees nothing, eager attention would take the mean of all tokens.
            again.set_attn_implementation("sdpa" if kind.startswith("Mistral3") else "eager")
        return again.eval().float()


def make(name: str) -> None:
    kind, sizes, call = MODELS[name]
    tensors, config = tensors_and_config(kind, sizes)
    seed = zlib.crc32(name.encode()) % 10_000
    weights = draw_weights(tensors, seed)
    model = load(kind, sizes, weights)
    with torch.no_grad():
        inputs, outputs = call(model, np.random.default_rng(seed))
    for key, value in outputs.items():
        assert np.isfinite(value).all(), f"{name}: {key}"
        assert value.std() > 0, f"{name}: {key}"
    folder = GOLDENS / name
    folder.mkdir(parents=True, exist_ok=True)
    for key in ("_diffusers_version", "transformers_version"):
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    description = {"seed": seed, "sha256": digest(weights), "tensors": tensors}
    (folder / "tensors.json").write_text(json.dumps(description, separators=(",", ":")) + "\n", encoding="utf-8")
    np.savez_compressed(folder / "golden.npz", **inputs, **{f"out_{k}": v for k, v in outputs.items()})
    sizes = {k: v.shape for k, v in outputs.items()}
    print(f"{name}: {sum(w.size for w in weights.values()):,} weights, {sizes}")


def make_pipeline(name: str) -> None:
    """A whole pipeline: the folder of diffusers without its weights, with how each is drawn, and what it draws."""
    pipeline, scheduler, models = PIPELINES[name]
    folder = GOLDENS / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    parts: dict = write_tokenizers(name, folder)
    for part, (kind, sizes) in models.items():
        tensors, config = tensors_and_config(kind, sizes)
        seed = zlib.crc32(f"{name}/{part}".encode()) % 10_000
        weights = draw_weights(tensors, seed)
        parts[part] = load(kind, sizes, weights)
        (folder / part).mkdir()
        (folder / part / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        description = {"seed": seed, "sha256": digest(weights), "tensors": tensors}
        (folder / part / "tensors.json").write_text(json.dumps(description, separators=(",", ":")) + "\n", encoding="utf-8")
    parts["scheduler"] = getattr(diffusers, SCHEDULERS.get(name, "FlowMatchEulerDiscreteScheduler"))(**scheduler)
    pipe = getattr(diffusers, pipeline)(**parts, **WITHOUT.get(name, {}))
    with tempfile.TemporaryDirectory() as scratch:
        pipe.save_pretrained(scratch)
        shutil.copyfile(Path(scratch) / "model_index.json", folder / "model_index.json")
        shutil.copytree(Path(scratch) / "scheduler", folder / "scheduler")
    outputs = images_of(pipe, name)
    if name in ("pipeline-sd", "pipeline-sdxl"):
        outputs["out_learned"] = learned_images(pipe, folder)
    if (lora := lora_file(pipe, name, folder)) is not None:
        pipe.load_lora_weights(lora)
        outputs["out_lora"] = images_of(pipe, name)["out_images"]
        assert np.abs(outputs["out_lora"] - outputs["out_images"]).max() > 0.02
    for key, value in outputs.items():
        assert np.isfinite(value).all(), f"{name}: {key}"
        assert value.std() > 0.02, f"{name}: {key}"
    np.savez_compressed(folder / "golden.npz", **outputs)
    print(f"{name}: {({key: value.shape for key, value in outputs.items()})}")


def make_single_file(name: str) -> None:
    """A file in its authors' names: how each tensor is drawn, and what diffusers' models answer with it."""
    shapes, seed = author_shapes(name, fresh), zlib.crc32(name.encode()) % 10_000
    # A wide sum keeps its size.
    spread = {key: round(0.7 * float(np.prod(shape[1:])) ** -0.5, 4) for key, shape in shapes.items() if len(shape) > 1}
    is_norm = lambda key: key.endswith(".scale") or ("norm" in key and key.endswith(".weight"))  # noqa: E731
    tensors = {key: [list(shape), 1.0 if is_norm(key) else 0.0, spread.get(key, NOISE)] for key, shape in sorted(shapes.items())}
    weights = draw_weights(tensors, seed)
    inputs, outputs = author_golden(name, weights, fresh, np.random.default_rng(seed))
    folder = GOLDENS / name
    folder.mkdir(parents=True, exist_ok=True)
    description = {"seed": seed, "sha256": digest(weights), "tensors": tensors}
    (folder / "tensors.json").write_text(json.dumps(description, separators=(",", ":")) + "\n", encoding="utf-8")
    np.savez_compressed(folder / "golden.npz", **inputs, **{f"out_{k}": v for k, v in outputs.items()})
    print(f"{name}: {sum(w.size for w in weights.values()):,} weights, {({k: v.shape for k, v in outputs.items()})}")


def check_single_file(name: str) -> None:
    description = json.loads((GOLDENS / name / "tensors.json").read_text(encoding="utf-8"))
    golden, weights = np.load(GOLDENS / name / "golden.npz"), draw_weights(description["tensors"], description["seed"])
    for key, value in author_golden(name, weights, fresh, np.random.default_rng(description["seed"]))[1].items():
        assert np.abs(value - golden[f"out_{key}"]).max() < 1e-5 * np.abs(value).max(), f"{name}: {key}"
    print(f"{name}: equal")


def check_pipeline(name: str) -> None:
    """What Argosy writes of a pipeline, loaded by diffusers: it must draw what the golden has."""
    with tempfile.TemporaryDirectory() as scratch:
        ours = "import sys; from golden_weights import write_pipeline; import argosy; from pathlib import Path; "
        ours += "golden, out = map(Path, sys.argv[1:]); argosy.load(write_pipeline(golden, out / 'given')).save(out / 'ours')"
        paths = {"PYTHONPATH": str(ROOT / "tests"), "PYTHONHOME": ""}
        environment = {k: v for k, v in (os.environ | paths).items() if v}
        subprocess.run([ROOT / "run", "python", "-c", ours, GOLDENS / name, scratch], check=True, env=environment)
        pipe = diffusers.DiffusionPipeline.from_pretrained(f"{scratch}/ours")
        assert type(pipe).__name__ == PIPELINES[name][0]
        golden = np.load(GOLDENS / name / "golden.npz")
        for key, value in images_of(pipe, name).items():
            off = np.abs(value - golden[key]).max() / np.abs(golden[key]).max()
            assert off < 1e-5, f"{name}: {key} differs by {off:.2g} of its largest value"
    print(f"{name}: equal, from a folder that Argosy wrote")


def check(names: list[str]) -> None:
    """The stored goldens again, from torch as it is now."""
    for name in names:
        kind, sizes, call = MODELS[name]
        description = json.loads((GOLDENS / name / "tensors.json").read_text(encoding="utf-8"))
        golden = np.load(GOLDENS / name / "golden.npz")
        with torch.no_grad():
            _, outputs = call(
                load(kind, sizes, draw_weights(description["tensors"], description["seed"])), np.random.default_rng(description["seed"])
            )
        for key, value in outputs.items():
            off = np.abs(value - golden[f"out_{key}"]).max() / np.abs(value).max()
            assert off < 1e-5, f"{name}: {key} differs by {off:.2g} of its largest value"
        print(f"{name}: equal")


if __name__ == "__main__":
    verb, *names = sys.argv[1:] or ["check"]
    every = names or [*MODELS, *PIPELINES, *SINGLE_FILES]
    whole = [name for name in every if name in PIPELINES]
    if verb == "make":
        for name in every:
            (make_pipeline if name in PIPELINES else make_single_file if name in SINGLE_FILES else make)(name)
    else:
        check([name for name in every if name in MODELS])
        for name in every:
            if name in SINGLE_FILES:
                check_single_file(name)
        for name in whole:
            check_pipeline(name)
