"""Files of VGG and of LPIPS's linear layers, as torchvision and the `lpips` package name their tensors.

    features.0.weight, classifier.0.weight ...           torchvision's vgg16; the classifier is left out
    net.slice1.0.weight, lin0.model.1.weight ...         lpips.LPIPS(net="vgg"), whole
    lin0.model.1.weight [1 C 1 1] ...                    its linear layers alone, to lay over either

These projects publish files of torch's own format, which run code when they are read; they are refused, with how to convert them.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from argosy.core.errors import BadInput
from argosy.core.formats import OverlaidTensors, TensorReader, TensorView
from argosy.core.formats.safetensors import SafeTensors
from argosy.core.keymap import KeyMap
from argosy.models.vgg import VGGConfig, vgg_settings
from argosy.weights.hub.reader import MappedTensors
from argosy.weights.model import OpenedModel

FIRST = "features.0.weight"
SLICES = re.compile(r"^net\.slice\d+\.")
# Dropout, where lpips has one, stands before the layer.
LINEAR = re.compile(r"^lin(\d+)\.model\.[01]\.weight$")
PICKLES = (".pth", ".pt", ".bin", ".ckpt", ".pkl")


def vgg_names(file: TensorReader) -> dict[str, str]:
    """{torchvision's name or that of a linear layer: name in the file}; empty: the file has no VGG."""
    names = {SLICES.sub("features.", name): name for name in file.names}
    return names if FIRST in names else {}


def open_vgg(path: Path, file: TensorReader, names: Mapping[str, str]) -> OpenedModel:
    """The VGG of a file.

    Args:
        names: as `vgg_names` has them.

    Raises:
        BadInput: its tensors are not those of a VGG.
    """
    sources = {name: source for name, source in names.items() if name.startswith("features.")} | linear_names(file)
    try:
        config: Any = VGGConfig(**vgg_settings({name: file.shape(source) for name, source in sources.items()}))
    except BadInput as error:
        raise BadInput(error.what, where=str(path), hint=error.hint) from None
    except (KeyError, IndexError, ValueError) as error:
        raise BadInput(f"the tensors do not fit a vgg: {error}", where=str(path), hint="torchvision's vgg16") from None
    weights = MappedTensors(KeyMap(*config.hub_rows()), TensorView(file, names=sources), str(path))
    return OpenedModel(path, "file", config, weights)


def linear_names(file: TensorReader) -> dict[str, str]:
    """{name of a linear layer: name in the file}."""
    matches = ((LINEAR.match(name), name) for name in file.names)
    return {f"lin{match[1]}.model.1.weight": name for match, name in matches if match}


def open_linear(path: str | Path, net: VGGConfig) -> OpenedModel:
    """The linear layers of a file, for a VGG: `weights` has them alone.

    Raises:
        BadInput: the file is none, is of another format, or has linear layers of another net.
        Damaged: the file contradicts itself.
    """
    path = Path(path)
    if not path.is_file():
        raise BadInput(f"no file {path}", where="objective.perceptual.linear", hint="the weights of lpips for vgg, as .safetensors")
    check_format(path)
    file = SafeTensors.open(path)
    names = linear_names(file)
    if not names:
        problem = f"{path} has no linear layers of LPIPS: its tensors begin with {', '.join(sorted(file.names)[:3])}"
        raise BadInput(problem, hint="lin0.model.1.weight and so on, of the lpips package's weights for vgg")
    config: Any = net.model_copy(update={"linear": True})
    expected = [(1, width, 1, 1) for width in config.widths]
    actual = {int(name[len("lin") :].split(".")[0]): file.shape(source) for name, source in names.items()}
    if [actual[i] for i in sorted(actual)] != expected or sorted(actual) != list(range(len(expected))):
        widths = ", ".join(str(shape[1] if len(shape) == 4 else shape) for _, shape in sorted(actual.items()))
        problem = f"{path} weighs {widths} channels, and the net's maps have {', '.join(map(str, config.widths))}"
        raise BadInput(problem, hint="lpips has weights for each net of its own: those of vgg")
    rows, sizes = config.hub_rows()
    rows = [row for row in rows if str(row.names).startswith("lin")]
    weights = MappedTensors(KeyMap(rows, sizes), TensorView(file, names=names), str(path))
    return OpenedModel(path, "file", config, weights)


def with_linear(net: OpenedModel, linear: OpenedModel) -> OpenedModel:
    """A VGG with the linear layers of another file, in place of its own, if it has any."""
    return replace(net, config=linear.config, weights=OverlaidTensors(net.weights, linear.weights))


def check_format(path: Path) -> None:
    """Checks that a file is no pickle, by its name.

    Raises:
        BadInput: it is one; says how to convert it.
    """
    if path.suffix in PICKLES:
        convert = f'safetensors.torch.save_file(torch.load("{path.name}", weights_only=True), "{path.stem}.safetensors")'
        raise BadInput(f"{path} is a file of torch, which may run code when it is read", hint=f"convert it once: {convert}")
