"""Networks of convolutions as a list of layers, each at the name that diffusers gives it.

A convolutional network is no stack of equal layers, so its structure is data: `LayerSite`s. The module is built from them
(`parts.net`), and so is the table of names; weights have the same paths here and there.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from argosy.core.keymap import KeyRow

SiteKind = Literal["conv", "causal", "linear", "vector", "norm", "layer_norm", "channel_norm", "frame_norm"]
NORMS = ("norm", "layer_norm", "channel_norm", "frame_norm")
# Axes of size 1 after that of channels, in diffusers' files.
ONES = {"channel_norm": " 1 1 1", "frame_norm": " 1 1"}


class LayerSite(NamedTuple):
    """One layer of a network.

    name: its path, in diffusers' file and in ours.
    kind: conv; causal, a convolution over the frames of a video too; linear, on positions [B T I]; vector, on one vector for an image
        [B I]; norm: GroupNorm; layer_norm; channel_norm, over the channels of a position in a video; frame_norm, of a frame.
    inner, outer: channels in and out.
    taps: height and width of a convolution's kernel.
    level: how many times height and width were halved where it stands, or below 0 doubled. None: once for an image.
    eps: of a norm; None: that of the whole network.
    reads_text: whether its positions are tokens of a text.
    frame_taps: frames of a causal convolution's kernel.
    reads_first: whether it reads the first frame of a video, and an image.
    zero: whether it begins at zero, so that training starts without it.
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
    """The table of names, and the sizes that its rows use."""
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
    """FLOPs of the layers for an image with so many positions at level 0, and a text of so many tokens."""
    flops = 0
    for site in sites:
        if site.kind not in NORMS and site.reads_first:
            weights = site.inner * site.outer * site.frame_taps * (site.taps**2 if site.kind in ("conv", "causal") else 1)
            level = site.level or 0
            times = 1 if site.level is None else positions * 4 ** max(-level, 0) // 4 ** max(level, 0)
            flops += 2 * weights * (text if site.reads_text else times)
    return flops


def resnet_sites(name: str, inner: int, outer: int, level: int, time: int | None = None) -> list[LayerSite]:
    """A residual block: two convolutions after norms, and one of a single tap where channels change.

    Args:
        time: width of the time step's vector; None: the block reads none.
    """
    sites = [LayerSite(f"{name}.norm1", "norm", inner, inner), LayerSite(f"{name}.conv1", "conv", inner, outer, level=level)]
    sites += [] if time is None else [LayerSite(f"{name}.time_emb_proj", "vector", time, outer, level=None)]
    sites += [LayerSite(f"{name}.norm2", "norm", outer, outer), LayerSite(f"{name}.conv2", "conv", outer, outer, level=level)]
    return sites + ([LayerSite(f"{name}.conv_shortcut", "conv", inner, outer, 1, level=level)] if inner != outer else [])
