"""Convolutional networks as lists of layers, each with the name that diffusers gives it.

A convolutional network is not a stack of equal layers, so its structure is a list of `LayerSite`. Both the module (`parts.net`) and the
rows of tensor names are built from that list. Weights have the same paths in diffusers' files and in the module.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from argosy.core.keymap import KeyRow

SiteKind = Literal["conv", "causal", "linear", "vector", "norm", "layer_norm", "channel_norm", "frame_norm"]
NORMS = ("norm", "layer_norm", "channel_norm", "frame_norm")
# The axes of size 1 that follow the axis of channels in diffusers' files, by kind of norm.
ONES = {"channel_norm": " 1 1 1", "frame_norm": " 1 1"}


class LayerSite(NamedTuple):
    """One layer of a network.

    name: the path of the layer, the same in diffusers' files and in the module.
    kind: the kind of layer:
        conv: a convolution over images.
        causal: a convolution over videos, causal in time.
        linear: a linear layer on positions [B T I].
        vector: a linear layer on one vector for each image [B I].
        norm: a GroupNorm.
        layer_norm: a LayerNorm.
        channel_norm: a norm over the channels of each position of a video.
        frame_norm: a norm over the channels of each position of a frame.
    inner: the number of input channels.
    outer: the number of output channels.
    taps: the kernel size of a convolution in height and width.
    level: how often height and width have been halved at this layer. Below 0: how often they have been doubled. None: the layer runs
        once for an image, not on positions.
    eps: the epsilon of a norm. None: that of the whole network.
    reads_text: whether the layer reads the tokens of a text instead of positions of the image.
    frame_taps: the kernel size of a causal convolution in time.
    reads_first: whether the layer runs on the first frame of a video, and on images.
    zero: whether the weights are initialized to zero.
    """

    name: str
    kind: SiteKind
    inner: int
    outer: int
    taps: int = 3
    bias: bool = True
    stride: int = 1
    level: int | None = 0
    eps: float | None = None
    reads_text: bool = False
    frame_taps: int = 1
    reads_first: bool = True
    zero: bool = False


def site_rows(sites: Iterable[LayerSite]) -> tuple[list[KeyRow], dict[str, int]]:
    """Returns the rows that map tensor names to weights, and the size of each axis in the rows."""
    rows: list[KeyRow] = []
    sizes: dict[str, int] = {}
    for site in sites:
        i, o, t = f"i{site.inner}", f"o{site.outer}", f"{site.taps}"
        sizes |= {i: site.inner, o: site.outer, f"p{t}": site.taps, f"q{t}": site.taps}
        if site.kind in ONES:
            rows.append(KeyRow(f"{site.name}.gamma", f"{site.name}.scale", f"{o}{ONES[site.kind]} -> {o}"))
            continue
        if site.kind in NORMS:
            rows.append(KeyRow(f"{site.name}.weight", f"{site.name}.scale", f"{o} -> {o}"))
        elif site.kind == "causal":
            f = f"f{site.frame_taps}"
            sizes[f] = site.frame_taps
            rows.append(KeyRow(f"{site.name}.weight", f"{site.name}.w", f"{o} {i} {f} p{t} q{t} -> {f} p{t} q{t} {i} {o}"))
        elif site.kind == "conv":
            rows.append(KeyRow(f"{site.name}.weight", f"{site.name}.w", f"{o} {i} p{t} q{t} -> p{t} q{t} {i} {o}"))
        else:
            rows.append(KeyRow(f"{site.name}.weight", f"{site.name}.w", f"{o} {i} -> {i} {o}"))
        if site.bias:
            rows.append(KeyRow(f"{site.name}.bias", f"{site.name}.b", f"{o} -> {o}"))
    return rows, sizes


def site_flops(sites: Iterable[LayerSite], positions: int, text: int = 0) -> int:
    """Counts the FLOPs of these layers.

    Args:
        positions: the number of positions of the image at level 0.
        text: the number of text tokens.
    """
    flops = 0
    for site in sites:
        if site.kind not in NORMS and site.reads_first:
            weights = site.inner * site.outer * site.frame_taps * (site.taps**2 if site.kind in ("conv", "causal") else 1)
            level = site.level or 0
            times = 1 if site.level is None else positions * 4 ** max(-level, 0) // 4 ** max(level, 0)
            flops += 2 * weights * (text if site.reads_text else times)
    return flops


def resnet_sites(name: str, inner: int, outer: int, level: int, time: int | None = None) -> list[LayerSite]:
    """Returns the layers of a residual block: two convolutions with norms before them, and a 1 x 1 convolution as shortcut if the
    number of channels changes.

    Args:
        name: the path of the block.
        inner, outer, level: as in `LayerSite`.
        time: the width of the time step's embedding. None: the block reads no time step.
    """
    sites = [LayerSite(f"{name}.norm1", "norm", inner, inner), LayerSite(f"{name}.conv1", "conv", inner, outer, level=level)]
    sites += [] if time is None else [LayerSite(f"{name}.time_emb_proj", "vector", time, outer, level=None)]
    sites += [LayerSite(f"{name}.norm2", "norm", outer, outer), LayerSite(f"{name}.conv2", "conv", outer, outer, level=level)]
    return sites + ([LayerSite(f"{name}.conv_shortcut", "conv", inner, outer, 1, level=level)] if inner != outer else [])
