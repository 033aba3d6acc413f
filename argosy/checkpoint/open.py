"""Opens the model that a MODEL argument names: a Hub folder, a GGUF file, a PEFT folder, a run directory or one checkpoint. It may be
on this machine, at an address or on the Hub. No weights are read.
"""

import atexit
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from argosy.checkpoint.base import UNDER_ADAPTERS, ModelRole, check_exists, check_same_weights
from argosy.checkpoint.checkpoints import Checkpoints
from argosy.checkpoint.medium.objects import copy_tree
from argosy.checkpoint.run_directory import CHECKPOINTS, TOKENIZER, RunDirectory
from argosy.checkpoint.step.adapters import open_adapted
from argosy.checkpoint.step.layout import META
from argosy.checkpoint.step.load import read_meta
from argosy.checkpoint.step.reader import StepReader
from argosy.core.addresses import local_path
from argosy.core.errors import BadInput, Damaged
from argosy.core.hub.download import local_model
from argosy.core.settings import dump
from argosy.core.settings.schema import Choice
from argosy.data.tokenizers.load import matching
from argosy.models import FAMILIES
from argosy.models.parts.stack import stored_as
from argosy.weights import manifest
from argosy.weights.adapted import open_peft, peft_base
from argosy.weights.gguf.reader import open_gguf
from argosy.weights.hub.reader import open_folder
from argosy.weights.hub.single_file import open_single_file
from argosy.weights.model import COMPANIONS, OpenedModel, config_of
from argosy.weights.quantized import DequantizedTensors, QuantizedWeights, quantized_model, read_schemes


def open_model(path: str | Path, warn: Callable[[str], None] = lambda _: None) -> OpenedModel:
    """Opens a model without reading weights.

    Raises:
        BadInput: there is nothing at the path, or no model.
        Damaged: the files of the model differ from what was written.
    """
    path = local_path(local_model(path, warn))
    if "://" in path:
        path = fetch_model(path)
    path = Path(path)
    if path.is_file() and path.suffix == ".gguf":
        return open_gguf(path)
    if path.is_file() and path.suffix == ".safetensors":
        return open_single_file(path, warn)
    if (path / "config.json").is_file():
        return open_folder(path, warn)
    if (path / "adapter_config.json").is_file():
        return open_peft(path, open_model(peft_base(path), warn))
    if (path / META).is_file():
        manifest.verify_folder(path)
        return _open_step(path, warn)
    if (path / CHECKPOINTS).is_dir():
        return _open_newest(path, Checkpoints(path / CHECKPOINTS, warn=warn), warn)
    if (path / "model_index.json").is_file():
        inner = next((name for name in ("transformer", "unet") if (path / name).is_dir()), "vae")
        problem = f"{path} is a pipeline of diffusers, with a model in each of its folders"
        whole = "argosy.load, argosy generate and `argosy convert A --check B` take the whole"
        raise BadInput(problem, hint=f"one of them, such as {path / inner}; {whole}")
    if path.is_file():
        raise BadInput(
            f"{path} is a file, but neither .gguf nor .safetensors",
            hint="a Hub folder, a .gguf file, a run directory, a checkpoint step or hf:OWNER/NAME",
        )
    if not path.exists():
        raise BadInput(f"no model at {path}", hint="a Hub folder, a .gguf file, a run directory, a checkpoint step or hf:OWNER/NAME")
    raise BadInput(
        f"{path} is not a model: it has no config.json, no meta.json and no checkpoints",
        hint="a Hub folder, a .gguf file, a run directory, a checkpoint step or hf:OWNER/NAME",
    )


def model_layer(path: str | Path) -> dict[str, Any]:
    """Returns the settings of a stored model, including its family, to be merged under `model`. `model=FOLDER` and
    `init.weights=FOLDER` stand for them.

    Raises:
        BadInput, Damaged: the errors of `open_model`.
    """
    config = open_model(path).config
    # Settings of a head that the model does not have are left open, so that a run can train one.
    heads = () if config.scored else ("scores", "labels", "problem_type")
    values = {key: value for key, value in dump(config).items() if key not in heads}
    return {"family": Choice(FAMILIES, tag="family").name_of(config)} | values


def open_base(base: Mapping[str, Any], warn: Callable[[str], None] = lambda _: None, *, thorough: bool = False) -> OpenedModel:
    """Opens the base model under the adapters of a checkpoint.

    Args:
        base: the result of `base.describe_base`.
        thorough: whether every file is hashed, as in `open_same`.

    Raises:
        BadInput: the base is not at its path, or its weights have changed.
    """
    return open_same(base, warn, thorough=thorough, role=UNDER_ADAPTERS)


def open_same(description: Mapping[str, Any], warn: Callable[[str], None], *, thorough: bool, role: ModelRole) -> OpenedModel:
    """Opens the model that `base.describe_base` described.

    Args:
        thorough: whether files of the recorded size and time are hashed too.

    Raises:
        BadInput: the model is not at its path, or its weights have changed.
    """
    check_exists(description, role)
    stored = open_model(description["path"], warn)
    check_same_weights(stored, description, role, thorough)
    return stored


def fetch_model(address: str) -> Path:
    """Copies a remote model to a local folder, which exists until the process ends. For a run, the newest good checkpoint and the
    tokenizer are copied. For any other model, all files are copied.

    Raises:
        BadInput: there is no model, or the run has not saved yet.
        Damaged: no checkpoint of the run is good.
    """
    run = RunDirectory(address)
    if not run.store.list():
        raise BadInput(f"nothing at {address}", hint="the address of a Hub folder, a run directory or a checkpoint")
    scratch = Path(tempfile.mkdtemp(prefix="argosy-"))
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    if not run.store.is_directory(CHECKPOINTS):
        return copy_tree(run.store, scratch / "model")
    step = run.checkpoints.latest_good()
    if step is None:
        raise BadInput(f"{address} has no checkpoint yet", hint="the run has not saved; wait, or train it further")
    if run.store.is_directory(TOKENIZER):
        copy_tree(run.store.child(TOKENIZER), scratch / TOKENIZER)
    # If the parent of the target were missing, `shutil.move` would copy instead of rename, which takes twice the disk space and
    # minutes.
    (scratch / CHECKPOINTS).mkdir(exist_ok=True)
    return Path(shutil.move(run.checkpoints.path(step), scratch / CHECKPOINTS / str(step)))


def _open_newest(run: Path, checkpoints: Checkpoints, warn: Callable[[str], None]) -> OpenedModel:
    """Opens the newest good checkpoint of a run. If the run removes it before it is locked, the search starts again."""
    step = checkpoints.latest_good()
    if step is None:
        raise BadInput(f"{run} has no checkpoint yet", hint="the run has not saved; wait, or train it further")
    try:
        return _open_step(checkpoints.path(step), warn)
    except (BadInput, Damaged):
        if step in checkpoints.steps():
            raise
    return _open_newest(run, checkpoints, warn)


def _open_step(folder: Path, warn: Callable[[str], None] = lambda _: None) -> OpenedModel:
    meta = read_meta(folder)
    try:
        config = config_of(meta["model"])
    except KeyError as missing:
        raise Damaged(f"{META} has no {missing}", where=str(folder)) from None
    # A converted model has its small files in its own folder, a step of a run in the run directory.
    folders = [folder, folder.parent.parent / TOKENIZER]
    companions = next((folder for folder in folders if matching(folder, COMPANIONS)), None)
    if "base" in meta:
        adapted = open_adapted(folder, config, meta, open_base(meta["base"], warn))
        return OpenedModel(folder, "argosy", config, adapted.weights, companions, meta.get("hub", {}), adapted)
    hub = meta.get("hub", {})
    if "quantization" in meta:
        schemes = read_schemes(meta["quantization"], str(folder / META))
        quantized = QuantizedWeights(schemes, StepReader(folder, quantized_model(config, schemes)))
        return OpenedModel(
            folder, "argosy", config, DequantizedTensors(config, quantized), companions, hub, quantized=quantized
        )
    return OpenedModel(folder, "argosy", config, StepReader(folder, config.build(stored_as(meta["decided"]))), companions, hub)
