"""`argosy quantize`: quantizes a model weight by weight, without building it.

Memory stays below a few times the source's largest weight; with calibration data, near that of the largest layer and the Gram matrices
of its inputs. After an interruption, a kill or a full disk, the same command resumes.
"""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np

from argosy.adapt.calibration.calibrate import CalibratedWeights, calibrate
from argosy.adapt.calibration.data import CalibrationData, calibration_data
from argosy.adapt.calibration.folder import CalibrationFolder
from argosy.adapt.calibration.layers import LayerRunner
from argosy.adapt.methods.settings import METHODS, Nearest, RoundingMethod
from argosy.adapt.quant import Scheme, as_floats, by_layer
from argosy.adapt.rotation import describe_rotation, rotated_model
from argosy.adapt.rules import Rule, check_dynamic, schemes_of
from argosy.checkpoint.save import Progress, write_model_folder
from argosy.core.counts import plural
from argosy.core.errors import BadInput, Unsupported
from argosy.core.formats import TensorReader
from argosy.core.process.resident import trim
from argosy.core.process.signals import before_leaving
from argosy.core.settings import dump
from argosy.core.settings.schema import Choice
from argosy.data.settings import DataSettings
from argosy.jobs.convert import DTYPES, CountedProgress, identity_of, open_source
from argosy.models.parts.einsum import Contraction
from argosy.models.parts.stack import Unroll
from argosy.models.settings import Rotation
from argosy.ops.quantized import Quantized
from argosy.weights.build import stored_tokenizer
from argosy.weights.hub.quantized.writer import compressed_files
from argosy.weights.model import OpenedModel
from argosy.weights.quantized import RoundedTensors
from argosy.weights.staging import is_occupied

Say = Callable[[str], None]
NEAREST = Nearest()
# Seconds between messages about layers.
TELL_S = 10


def quantize(
    source: str,
    target: Path,
    rules: Sequence[Rule],
    *,
    method: RoundingMethod = NEAREST,
    data: DataSettings | None = None,
    samples: int = 128,
    rotate: str | None = None,
    dtype: str | None = None,
    to: str = "argosy",
    say: Say = lambda _: None,
    progress: Progress = lambda new, all, kept_bytes: None,
) -> dict[str, Any]:
    """Quantizes a model. Returns a report: a row for each weight, with its bytes and errors.

    Args:
        source: the model.
        target: a new folder.
        rules: the rules that select contractions and their formats.
        method: the method of rounding.
        data: the calibration data, None if there is none.
        samples: the number of sequences of calibration data.
        rotate: `hadamard` rotates the residual stream and the value heads before quantization (`adapt.rotation`). `quarot` also lets
            the written model rotate activations while it runs. None rotates nothing.
        dtype: the type of the weights that are not quantized. None keeps the type of each weight.
        to: the format, argosy or compressed-tensors (a Hub folder).

    Raises:
        BadInput: the source is not a model or already quantized, the target exists, a rule matches nothing or needs data, or the data
            has too few tokens. Nothing is written.
        Unsupported: the layout cannot express a rule, or the model cannot be rotated. Nothing is written.
    """
    start = time.monotonic()
    if method.needs_data and data is None:
        name = Choice(METHODS).name_of(method)
        raise BadInput(f"method={name} needs calibration data", hint=f"method={name} data.source=FILE samples={samples}")
    if data is None:
        check_dynamic(rules, "quantize")
    stored = open_source(source, say)
    if stored.quantized is not None:
        raise BadInput(f"{source} is quantized already", hint="quantize the model it came from; or `argosy convert` makes floats of it")
    if rotate is not None:
        if rotate == "quarot" and to != "argosy":
            problem = f"to={to} has no place here for rotations while the model runs, so its readers would compute something else"
            raise Unsupported(problem, hint="rotate=hadamard, which changes weights alone; or Argosy's own format: leave out `to`")
        stored = rotated_model(stored, get_args(Rotation) if rotate == "quarot" else ())
        say(describe_rotation(stored.weights))
    order = {name.removesuffix(".w"): i for i, name in enumerate(stored.weights.names)}
    model = stored.config.build(Unroll())
    schemes = by_layer(model, schemes_of(model, list(rules), is_calibrated=data is not None))
    for note in delicate_weights(schemes, is_tied=bool(getattr(stored.config, "tied", False))):
        say(note)
    table = LayerTable()
    identity = identity_of(stored, to, dtype, 0) | {"rules": [dump(rule) for rule in rules], "method": described_method(method)}
    identity |= {} if rotate is None else {"rotate": rotate}
    count = CountedProgress(progress)
    kept_layers = target.with_name(f"{target.name}.calibration")

    def stopped() -> None:
        say(f"stopped; complete files are kept in {target}.part, and the same command resumes from there")

    def calibrating() -> None:
        say(f"stopped; complete layers are kept in {kept_layers}, and the same command resumes from there")

    calibrated = None
    if data is not None:
        check_plan(stored, target, to, schemes)
        tokens = calibration_data(
            *(data, samples, stored_tokenizer(stored)), vocab=stored.config.vocab, context=stored.config.context
        )
        say(f"calibrating on {plural(len(tokens.tokens), 'sequence')} of {data.source_name}, {plural(tokens.size, 'token')}")
        identity |= {"data": tokens.identity}
        with before_leaving(calibrating):
            calibrated = calibrated_layers(stored, schemes, method, tokens, kept_layers, identity, say)
        # Programs of the layers are not run again, and take more memory than the largest weight of a small model.
        jax.clear_caches()
        trim()

    def rounded(name: str, of: Contraction, w: np.ndarray) -> Quantized:
        if calibrated is not None and name in calibrated.places:
            return calibrated.read(name, of)  # type: ignore[arg-type]
        return method.quantize(of, w, schemes[name], None)

    plain = stored.weights if calibrated is None else calibrated.changed(stored.weights)
    weights = RoundedTensors(stored.config, plain, schemes, rounded, table.add)
    with before_leaving(stopped):
        write_model_folder(
            *(target, to, stored.config, weights, stored.hub, stored.companions),
            DTYPES[dtype] if dtype else None,
            stored_tokenizer(stored),
            identity=identity,
            progress=count,
            schemes=schemes,
        )
    # What a killed process had written was not quantized again.
    weights.see_all()
    if calibrated is not None:
        table.add_errors(calibrated)
        shutil.rmtree(kept_layers)
    unquantized = [name for name in stored.weights.names if name.removesuffix(".w") not in schemes]
    bytes_kept = sum(int(np.prod(stored.weights.shape(name))) * weights.dtype(name).itemsize for name in unquantized)
    return {
        "source": source,
        "target": str(target),
        "method": Choice(METHODS).name_of(method),
        "samples": None if data is None else samples,
        "weights": sorted(table.rows, key=lambda row: order[row["name"]]),
        "kept": {"tensors": len(unquantized), "bytes": bytes_kept, "largest": largest(stored.weights, unquantized)},
        "bytes": count.all,
        "source_bytes": stored_bytes(stored.weights),
        "seconds": time.monotonic() - start,
    }


def delicate_weights(schemes: Mapping[str, Scheme], *, is_tied: bool) -> list[str]:
    """Returns warnings about weights that these rules quantize although presets do not, one sentence for each kind."""
    out = []
    if "embed" in schemes and is_tied:
        out.append("a rule rounds `embed`, which is the head too: its error is in every logit; presets leave it as it is")
    routers = [name for name in schemes if name.rpartition(".")[2] in ("router", "shared_gate")]
    if routers:
        out.append(f"a rule rounds {plural(len(routers), 'router')}, such as `{routers[0]}`: tokens may go to other experts")
    return out


def described_method(method: RoundingMethod) -> dict[str, Any]:
    """Returns a method with its settings as JSON."""
    return {"name": Choice(METHODS).name_of(method)} | dump(method)


def check_plan(stored: OpenedModel, target: Path, to: str, schemes: Mapping[str, Scheme]) -> None:
    """Checks before calibration for mistakes that writing would find after it.

    Raises:
        BadInput: the target exists.
        Unsupported: the layout cannot express a scheme.
    """
    if is_occupied(target):
        raise BadInput(f"{target} is not empty", hint="name a new folder; nothing is ever overwritten")
    if to == "compressed-tensors":
        weights = RoundedTensors(stored.config, stored.weights, schemes, lambda name, of, w: schemes[name].quantize(of, w))
        compressed_files(stored.config, weights, schemes, hub=stored.hub)


def calibrated_layers(
    stored: OpenedModel,
    schemes: Mapping[str, Scheme],
    method: RoundingMethod,
    data: CalibrationData,
    path: Path,
    identity: Mapping[str, Any],
    say: Say,
) -> CalibratedWeights:
    """Quantizes the layers of a model with calibration, and stores them in the folder `path`. Layers that an earlier process finished
    are reused."""
    runner = LayerRunner(stored.config, stored.weights, schemes)
    folder = CalibrationFolder(path, identity, (*data.tokens.shape, stored.config.width))
    if folder.layers:
        say(f"resuming: {plural(folder.layers, 'layer')} of {len(runner.plan)} are calibrated already")
    return calibrate(runner, method, data, folder, layer_progress(say, "calibrated"))


def layer_progress(say: Say, verb: str) -> Callable[[int, int], None]:
    """Returns a function of (finished layers, all layers) that says from time to time "3 of 30 layers are calibrated"."""
    last = time.monotonic()

    def done(layers: int, all: int) -> None:
        nonlocal last
        if time.monotonic() - last > TELL_S:
            last = time.monotonic()
            say(f"{layers} of {all} layers are {verb}")

    return done


def stored_bytes(weights: TensorReader) -> int:
    """Returns the size of all weights of a model in their stored types, in bytes."""
    return sum(int(np.prod(weights.shape(name))) * weights.dtype(name).itemsize for name in weights.names)


def largest(weights: Any, names: Sequence[str]) -> list[str]:
    """Returns the names of the largest weights among `names`, at most three."""
    return sorted(names, key=lambda name: -int(np.prod(weights.shape(name))))[:3]


class LayerTable:
    """The result of quantization, a row for each weight.

    rows: each with the name, the scheme, the number of weights, bytes, bits per weight including scales, and `error`, the root mean
        square of the rounding error over that of the weight. With calibration data also `output_error`, the same for the output,
        `nearest_error`, that of rounding to nearest, and `uncalibrated`, the share of experts that got too few tokens.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, name: str, of: Contraction, w: np.ndarray, quantized: Quantized) -> None:
        scheme: Scheme = of.scheme  # type: ignore[attr-defined]
        change = float(np.linalg.norm((np.asarray(as_floats(quantized)) - w).ravel()))
        size = float(np.linalg.norm(w.ravel()))
        granularity = scheme.granularity or scheme.format.block or "channel"
        sizes = {"numbers": w.size, "bytes": quantized.nbytes, "bits": 8 * quantized.nbytes / w.size}
        error = change / size if size else 0.0
        self.rows.append({"name": name, **asdict(scheme), "granularity": granularity, **sizes, "error": error})

    def add_errors(self, calibrated: CalibratedWeights) -> None:
        """Adds the errors on calibration data to each row."""
        none = {"output_error": None, "nearest_error": None, "uncalibrated": 1.0, "balanced": False}
        for row in self.rows:
            row |= none | {key: value for key, value in calibrated.rows.get(row["name"], {}).items() if key != "name"}
