"""`lm.quantize("w4", method="gptq", data=...)`: quantizes the weights of a model in memory.

Everything is computed before the model is changed, so a mistake or an interruption leaves it as it was. In addition to the model,
memory holds its quantized weights, and a temporary folder on disk holds the inputs of two layers.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np

from argosy.adapt.calibration.calibrate import calibrate
from argosy.adapt.calibration.data import calibration_data
from argosy.adapt.calibration.folder import CalibrationFolder
from argosy.adapt.calibration.layers import LayerRunner
from argosy.adapt.methods.settings import METHODS, Nearest, RoundingMethod
from argosy.adapt.quant import PARTS, by_layer, quantized_einsum
from argosy.adapt.rules import Rule, schemes_of
from argosy.adapt.surgery import at, find, put_at
from argosy.core.errors import BadInput, Unsupported
from argosy.core.settings import SettingsLayer, read_settings
from argosy.core.settings.schema import Choice
from argosy.data.settings import DataSettings
from argosy.models.parts.einsum import Contraction, Einsum
from argosy.models.parts.stack.addresses import layer_addresses
from argosy.models.parts.weight import put, split, variables
from argosy.ops.quantized import Quantized
from argosy.parallel.place import on_devices
from argosy.weights.fill import model_weights, stored_arrays
from argosy.weights.quantized import RoundedTensors

# Calibration data: a source as in `data.source`, a list of texts, or a mapping of data settings.
Data = str | Path | Sequence[str] | Mapping[str, Any]


def quantize_in_place(
    module: Any, config: Any, tokenizer: Any, rules: list[Rule], *, method: str | RoundingMethod, data: Data | None, samples: int
) -> list[str]:
    """Quantizes weights of a model in place. Arguments are those of `LM.quantize`. Returns the names of the quantized contractions, at
    least one.

    Raises:
        UserError: as `LM.quantize`. The model is not changed then.
        Unsupported: the weights are split over several devices.
    """
    rounding = METHODS[method]() if isinstance(method, str) else method
    if rounding.needs_data and data is None:
        hint = 'data="texts.jsonl", or a list of texts'
        raise BadInput(f"method={Choice(METHODS).name_of(rounding)} needs calibration data", hint=hint)
    schemes = schemes_of(module, rules, is_calibrated=data is not None)
    if data is None and isinstance(rounding, Nearest):
        modules = {name: quantized_einsum(at(module, name), scheme) for name, scheme in schemes.items()}
        return _put_all(module, modules)
    for name, of in find(module, ".*").items():
        if not isinstance(of, Einsum):
            problem = f"{name} is quantized already, or has an adapter"
            raise BadInput(problem, hint="a method reads the weights of the plain model: load it again, or lm.merge() adapters")
    if any(len(a.sharding.device_set) > 1 for a in split(module)[1].values() if isinstance(a, jax.Array)):
        raise Unsupported("several devices share these weights, and methods work on one", hint="`argosy quantize MODEL OUT method=...`")
    layer_schemes, weights = by_layer(module, schemes), model_weights(module)
    with TemporaryDirectory(prefix="argosy-calibration-") as place:
        calibrated = None
        if data is not None:
            settings = calibration_settings(data, Path(place))
            calibration = calibration_data(settings, samples, tokenizer, vocab=config.vocab, context=config.context)
            folder = CalibrationFolder(Path(place) / "layers", {}, (*calibration.tokens.shape, config.width))
            calibrated = calibrate(LayerRunner(config, weights, layer_schemes), rounding, calibration, folder)

        def rounded(name: str, of: Contraction, w: np.ndarray) -> Quantized:
            if calibrated is not None and name in calibrated.places:
                return calibrated.read(name, of)  # type: ignore[arg-type]
            return rounding.quantize(of, w, layer_schemes[name], None)

        plain = weights if calibrated is None else calibrated.changed(weights)
        changed = set() if calibrated is None else set(calibrated.changed_places)
        description = config.build(module.layers.run)
        modules = {name: quantized_einsum(at(description, name), scheme) for name, scheme in schemes.items()}
        _put_all(description, modules)
        names = layer_addresses(description)
        codes = {f"{name}.{part}" for name in schemes for part in PARTS}
        same = {address for address in variables(description) if address not in codes and changed.isdisjoint(names(address))}
        tensors = RoundedTensors(config, plain, layer_schemes, rounded)
        arrays = {a: on_devices(array, None) for a, array in stored_arrays(description, tensors, dtype=module.dtype, without=same)}
    put(description, {address: array for address, array in arrays.items() if address in codes})
    for name, replacement in modules.items():
        replacement.b = at(module, name).b
    _put_all(module, modules)
    put(module, {address: array for address, array in arrays.items() if address not in codes})
    return list(modules)


def _put_all(module: Any, modules: Mapping[str, Any]) -> list[str]:
    for name, replacement in modules.items():
        put_at(module, name, replacement)
    return list(modules)


def calibration_settings(data: Data, folder: Path) -> DataSettings:
    """The data settings for calibration data.

    Args:
        folder: the folder for a file that is written if `data` is a list of texts.
    """
    if isinstance(data, str | Path):
        return DataSettings(source=str(data))
    if isinstance(data, Mapping):
        return read_settings(DataSettings, SettingsLayer("data", data)).value
    source = folder / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in data), encoding="utf-8")
    return DataSettings(source=str(source))
