"""LPIPS by the `lpips` package 0.1.4 (Zhang et al. 2018; BSD-2), of random nets: `.reference/bin/python tests/reference/perceptual.py
FOLDER`, where FOLDER/lpips is theirs (`pip download --no-deps lpips==0.1.4`, unpacked). Written to goldens/images/lpips-*.

Its net comes from torchvision, whose wheels bring a CUDA of their own, so the list of layers of torchvision's vgg16 is built here; what
is compared is the package's normalization, slices, distance and gradient. The package has fixed widths: those of the small net's linear
layers are put in their place. In float64: where the sign of a feature turns by rounding, gradients differ.
"""

import json
import sys
import types
import zlib
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from golden_weights import digest, draw_weights

GOLDENS = Path(__file__).parents[1] / "goldens" / "images"
LAYERS = (2, 2, 3, 3, 3)
WIDTHS = {"lpips-small": (6, 7, 8, 9, 10), "lpips-vgg16": (64, 128, 256, 512, 512)}
IMAGES = (2, 3, 24, 19)


def vgg16(widths: tuple[int, ...]) -> torch.nn.Module:
    layers, inner = [], 3
    for width, count in zip(widths, LAYERS, strict=True):
        for _ in range(count):
            layers += [torch.nn.Conv2d(inner, width, 3, padding=1), torch.nn.ReLU(inplace=True)]
            inner = width
        layers.append(torch.nn.MaxPool2d(2, 2))
    net = torch.nn.Module()
    net.features = torch.nn.Sequential(*layers)
    return net


def make(name: str, torchvision: types.ModuleType) -> None:
    widths = WIDTHS[name]
    torchvision.models.vgg16 = lambda pretrained: vgg16(widths)
    import lpips

    outputs, tensors, inner, at = {}, {}, 3, 0
    for width, count in zip(widths, LAYERS, strict=True):
        for _ in range(count):
            tensors[f"features.{at}.weight"] = [[width, inner, 3, 3], 0.0, round((2 / (9 * inner)) ** 0.5, 4)]
            tensors[f"features.{at}.bias"] = [[width], 0.05, 0.05]
            at, inner = at + 2, width
        at += 1
    tensors |= {f"lin{i}.model.1.weight": [[1, width, 1, 1], 0.5, 0.3] for i, width in enumerate(widths)}
    seed = zlib.crc32(name.encode()) % 10_000
    weights = draw_weights(tensors, seed)
    draw = np.random.default_rng(seed)
    inputs = {key: draw.uniform(-1, 1, IMAGES).astype(np.float32) for key in ("images", "others")}
    # Where an image is nearly the other one, the distance is small and its gradient is not.
    inputs["others"][1] = inputs["images"][1] + 0.05 * inputs["others"][1]
    for learned in (True, False):
        net = lpips.LPIPS(net="vgg", pnet_rand=True, pretrained=False, lpips=learned, verbose=False)
        state = {f"net.slice{slice_of(key)}.{key.removeprefix('features.')}": w for key, w in weights.items() if key[0] == "f"}
        if learned:
            for i, width in enumerate(widths):
                layer = lpips.NetLinLayer(width, use_dropout=True)
                setattr(net, f"lin{i}", layer)
                net.lins[i] = layer
                state |= {f"{place}.model.1.weight": weights[f"lin{i}.model.1.weight"] for place in (f"lin{i}", f"lins.{i}")}
        wrong = net.load_state_dict({key: torch.from_numpy(w) for key, w in state.items()}, strict=False)
        assert not wrong.unexpected_keys
        assert set(wrong.missing_keys) == {"scaling_layer.shift", "scaling_layer.scale"}
        net.eval().double()
        x = torch.from_numpy(inputs["images"]).double().requires_grad_()
        total, layers = net(x, torch.from_numpy(inputs["others"]).double(), retPerLayer=True)
        total.sum().backward()
        end = "" if learned else "_baseline"
        outputs |= {f"out_distance{end}": total.detach().numpy().ravel(), f"out_gradient{end}": x.grad.numpy().astype(np.float32)}
        outputs[f"out_layers{end}"] = np.stack([layer.detach().numpy().ravel() for layer in layers])
    for key, value in outputs.items():
        assert np.isfinite(value).all(), key
        assert np.abs(value).max() > 0, key
    out = GOLDENS / name
    out.mkdir(exist_ok=True)
    description = {"seed": seed, "sha256": digest(weights), "tensors": tensors}
    (out / "tensors.json").write_text(json.dumps(description, separators=(",", ":")) + "\n", encoding="utf-8")
    np.savez_compressed(out / "golden.npz", **inputs, **outputs)
    print(name, outputs["out_distance"], outputs["out_distance_baseline"], outputs["out_layers"])


def slice_of(name: str) -> int:
    """The number of the package's part with this layer."""
    at = int(name.split(".")[1])
    return next(i for i, end in enumerate((4, 9, 16, 23, 30), 1) if at < end)


if __name__ == "__main__":
    stand_in = types.ModuleType("torchvision")
    stand_in.models = types.ModuleType("torchvision.models")
    sys.modules |= {"torchvision": stand_in, "torchvision.models": stand_in.models}
    sys.path.insert(0, sys.argv[1])
    for each in WIDTHS:
        make(each, stand_in)
