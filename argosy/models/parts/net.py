"""A convolutional network that is built from a list of its layers and their paths (`models.hub.nets`).

    net.down_blocks[0].resnets[1]        the layers with paths "down_blocks.0.resnets.1.*"
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float

from argosy.models.hub.nets import LayerSite
from argosy.models.parts.attention.attend import HEADS, Bidirectional
from argosy.models.parts.attention.cross import cross_attention
from argosy.models.parts.conv import LEGEND, CausalConv, ChannelNorm, Conv, GroupNorm
from argosy.models.parts.einsum import Einsum
from argosy.models.parts.norm import LayerNorm
from argosy.models.parts.stack.remat import Remat, rematerialize
from argosy.ops.attention import Score


class Branch(nnx.Module):
    """A node of a network. Its attributes are layers or further branches. Attributes that are numbers can be indexed."""

    def __getitem__(self, number: int) -> Any:
        return getattr(self, str(number))

    def __len__(self) -> int:
        return sum(name.isdigit() for name in vars(self))


def grow(root: nnx.Module, sites: Iterable[LayerSite], *, groups: int, eps: float = 1e-6, late: bool = False) -> None:
    """Adds layers to a module, in place, each at its path.

    Args:
        groups: the number of groups of each group norm.
        eps: the epsilon of group norms that give none themselves.
        late: the argument `late` of convolutions with a stride (`Conv`).
    """
    for site in sites:
        *way, last = site.name.split(".")
        node: Any = root
        for name in way:
            if not hasattr(node, name):
                setattr(node, name, Branch())
            node = getattr(node, name)
        setattr(node, last, _layer(site, groups, eps, late))


def run_part(function: Callable[..., Any], layers: Any, x: Array, remat: Remat) -> Any:
    """`function(layers, x)`, a part of a network whose backward pass may compute it again.

    Args:
        layers: a module, or a list of modules.
        remat: as in `parts.stack.remat`; convolutions are no products that `dots` keeps.
    """
    if remat == "none":
        return function(layers, x)
    graph, weights = nnx.split(layers)
    return rematerialize(lambda weights, x: function(nnx.merge(graph, weights), x), remat, unrolled=True)(weights, x)


def _layer(site: LayerSite, groups: int, eps: float, late: bool) -> nnx.Module:
    dims = {"I": site.inner, "O": site.outer}
    if site.kind == "conv":
        late = late and site.stride > 1
        return Conv(site.inner, site.outer, site.taps, stride=site.stride, bias=site.bias, late=late, zero=site.zero)
    if site.kind == "causal":
        return CausalConv(site.inner, site.outer, site.taps, site.frame_taps, bias=site.bias)
    if site.kind in ("channel_norm", "frame_norm"):
        return ChannelNorm(site.outer)
    if site.kind == "norm":
        return GroupNorm(site.outer, groups, eps if site.eps is None else site.eps)
    if site.kind == "layer_norm":
        return LayerNorm(site.outer)
    return Einsum("BTI,IO->BTO" if site.kind == "linear" else "BI,IO->BO", dims, bias=site.bias, legend=LEGEND)


def resnet(of: Any, x: Float[Array, "B H W I"], time: Float[Array, "B E"] | None = None) -> Float[Array, "B H W O"]:
    """Applies a residual block, which has the layers of `nets.resnet_sites`.

    Args:
        of: the block.
        time: the embedding of the time step. None for blocks without one.
    """
    y = of.conv1(jax.nn.silu(of.norm1(x)))
    if time is not None:
        y = y + of.time_emb_proj(jax.nn.silu(time))[:, None, None]
    y = of.conv2(jax.nn.silu(of.norm2(y)))
    return y + (of.conv_shortcut(x) if hasattr(of, "conv_shortcut") else x)


def net_attention(of: Any, x: Float[Array, "B T I"], memory: Float[Array, "B S E"], heads: int) -> Float[Array, "B T I"]:
    """Attention of the positions of x to those of a memory, without the residual connection.

    Args:
        of: a branch with the layers to_q, to_k, to_v and to_out.0.
        memory: the vectors to attend to. Pass x itself for self-attention.
    """
    split = partial(_heads, heads=heads)
    q, k, v = split(of.to_q(x)), split(of.to_k(memory)), split(of.to_v(memory))
    if memory is x:
        attend = Bidirectional.whole_rows(*x.shape[:2])
        y, _ = attend(q, {"k": k, "v": v}, None, HEADS, score=Score(q.shape[-1] ** -0.5))
    else:
        y = cross_attention(q, k, v)
    return of.to_out[0](y.reshape(*x.shape[:2], -1))


def _heads(x: Float[Array, "B T I"], heads: int) -> Float[Array, "B T N H"]:
    return x.reshape(*x.shape[:2], heads, -1)
