"""The module of Wan's autoencoder (`models.autoencoders.autoencoder_kl_wan` has the equations).

A video goes through in pieces: its first frame, then as many frames at a time as one latent frame stands for. What convolutions keep
between pieces is a tuple of arrays, so that one loop of the compiled program goes over any number of pieces, in the memory of one.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from argosy.models.blocks.autoencoder_kl import LOG_VARIANCE, Moments
from argosy.models.parts.attention.attend import HEADS, Bidirectional
from argosy.models.parts.conv import twice
from argosy.models.parts.net import grow
from argosy.ops.attention import Score
from argosy.ops.precision import sums_in

# Frames that a convolution reads before its own.
BEFORE = 2


class PastFrames:
    """The frames that the convolutions of a network read last, in the order in which they are called.

    Args:
        before: those of the piece before; None: this is the first piece.
    """

    def __init__(self, before: tuple[Array, ...] | None = None):
        self.is_first, self._before, self.after = before is None, list(before or ()), list[Array]()

    def joined(self, x: Float[Array, "B F H W C"], count: int = BEFORE) -> Float[Array, "B G H W C"]:
        """x after the last `count` frames before it: zeros before the first piece."""
        before = jnp.zeros((len(x), count, *x.shape[2:]), x.dtype) if self.is_first else self._before[len(self.after)]
        whole = jnp.concatenate([before, x], 1)
        self.keep(whole, count)
        return whole

    def keep(self, x: Float[Array, "B F H W C"], count: int) -> None:
        """Keeps the last frames of x for the next piece."""
        self.after.append(x[:, -count:])


class AutoencoderKLWan(nnx.Module):
    """Videos, or images, to latents and back. `dtype` is the type of activations."""

    def __init__(self, config: Any):
        self.config, self.dtype = config, jnp.float32
        grow(self, config.sites(), groups=1, late=True)

    def encode(self, images: Float[Array, "B *F H W 3"]) -> Moments:
        """The moments of latents. A video has a multiple of the frames of a latent frame, and one more."""
        of: Any = self
        x = of.quant_conv(self._in_pieces(self._encoded, _as_video(images).astype(self.dtype), self.config.frame_factor))
        mean, log_variance = jnp.split(_match_axes(x, images).astype(sums_in(x.dtype)), 2, -1)
        return Moments(mean, jnp.clip(log_variance, *LOG_VARIANCE))

    def decode(self, latents: Float[Array, "B *F h w C"]) -> Float[Array, "B *G H W 3"]:
        """Videos or images in -1..1, or a little beyond; float32 at least."""
        of: Any = self
        x = self._in_pieces(self._decoded, of.post_quant_conv(_as_video(latents).astype(self.dtype)), 1)
        return _match_axes(x, latents).astype(sums_in(x.dtype))

    def to_latents(self, moments: Moments, noise: Float[Array, "B *F h w C"] | None = None) -> Float[Array, "B *F h w C"]:
        """What denoisers read: the mean, or a sample with `noise`."""
        return self.config.to_latents(moments.mean if noise is None else moments.sample(noise))

    def from_latents(self, latents: Float[Array, "B *F h w C"]) -> Float[Array, "B *F h w C"]:
        """What `decode` reads, from a denoiser's latents."""
        return self.config.from_latents(latents)

    def __call__(self, images: Float[Array, "B *F H W 3"]) -> Float[Array, "B *F H W 3"]:
        """The videos or images again, by way of the means of their latents."""
        return self.decode(self.encode(images).mean)

    def _in_pieces(self, go: Callable[[Array, PastFrames], Array], x: Float[Array, "B F H W C"], size: int) -> Array:
        """`go` over the first frame, then over `size` frames at a time."""
        if (x.shape[1] - 1) % size:
            raise ValueError(f"{x.shape[1]} frames: a multiple of {size}, and one more")
        past = PastFrames()
        first = go(x[:, :1], past)
        if x.shape[1] == 1:
            return first

        def piece(before: tuple[Array, ...], some: Array) -> tuple[tuple[Array, ...], Array]:
            past = PastFrames(before)
            y = go(some, past)
            return tuple(past.after), y

        rest = x[:, 1:].reshape(len(x), -1, size, *x.shape[2:]).swapaxes(0, 1)
        _, later = jax.lax.scan(piece, tuple(past.after), rest)
        later = later.swapaxes(0, 1)
        return jnp.concatenate([first, later.reshape(len(x), -1, *later.shape[3:])], 1)

    def _encoded(self, x: Array, past: PastFrames) -> Array:
        of: Any = self.encoder  # pyright: ignore[reportAttributeAccessIssue]
        x = of.conv_in(past.joined(x))
        for i in range(len(of.down_blocks)):
            block = of.down_blocks[i]
            x = self._slower(block, x, past) if hasattr(block, "resample") else self._resnet(block, x, past)
        return self._ends(of, self._middle(of.mid_block, x, past), past)

    def _decoded(self, x: Array, past: PastFrames) -> Array:
        of: Any = self.decoder  # pyright: ignore[reportAttributeAccessIssue]
        x = self._middle(of.mid_block, of.conv_in(past.joined(x)), past)
        for i in range(len(of.up_blocks)):
            block = of.up_blocks[i]
            for j in range(len(block.resnets)):
                x = self._resnet(block.resnets[j], x, past)
            if hasattr(block, "upsamplers"):
                x = self._upsampled(block.upsamplers[0], x, past)
        return self._ends(of, x, past)

    def _resnet(self, of: Any, x: Array, past: PastFrames) -> Array:
        y = of.conv1(past.joined(jax.nn.silu(of.norm1(x))))
        y = of.conv2(past.joined(jax.nn.silu(of.norm2(y))))
        return y + (of.conv_shortcut(x) if hasattr(of, "conv_shortcut") else x)

    def _slower(self, of: Any, x: Array, past: PastFrames) -> Array:
        """Half the height and width, and half the frames where there is a convolution for that: the first one stays."""
        x = by_frame(of.resample[1], x)
        if not hasattr(of, "time_conv"):
            return x
        if past.is_first:
            past.keep(x, 1)
            return x
        return of.time_conv(past.joined(x, 1), 2)

    def _upsampled(self, of: Any, x: Array, past: PastFrames) -> Array:
        """Twice the height and width, and two frames for each where there is a convolution for that: the first one stays one."""
        if hasattr(of, "time_conv"):
            if past.is_first:
                # The frames after the first do not read it here.
                past.keep(jnp.zeros_like(jnp.concatenate([x] * BEFORE, 1)), BEFORE)
            else:
                y = of.time_conv(past.joined(x))
                B, F, H, W, _ = y.shape
                x = jnp.moveaxis(y.reshape(B, F, H, W, 2, -1), 4, 2).reshape(B, 2 * F, H, W, -1)
        return by_frame(lambda frames: of.resample[1](twice(frames)), x)

    def _middle(self, of: Any, x: Array, past: PastFrames) -> Array:
        x = self._resnet(of.resnets[0], x, past)
        x = x + by_frame(lambda frames: self._attention(of.attentions[0], frames), x)
        return self._resnet(of.resnets[1], x, past)

    def _attention(self, of: Any, x: Float[Array, "B H W C"]) -> Float[Array, "B H W C"]:
        """Attention of one head over the positions of a frame."""
        B, H, W, C = x.shape
        q, k, v = (a.reshape(B, H * W, 1, C) for a in jnp.split(of.to_qkv(of.norm(x)), 3, -1))
        attend = Bidirectional.whole_rows(B, H * W)
        y, _ = attend(q, {"k": k, "v": v}, None, HEADS, score=Score(C**-0.5))
        return of.proj(y.reshape(x.shape))

    def _ends(self, of: Any, x: Array, past: PastFrames) -> Array:
        return of.conv_out(past.joined(jax.nn.silu(of.norm_out(x))))


def by_frame(of: Callable[[Array], Array], x: Float[Array, "B F H W C"]) -> Float[Array, "B F h w D"]:
    """A function of images over each frame."""
    y = of(x.reshape(-1, *x.shape[2:]))
    return y.reshape(*x.shape[:2], *y.shape[1:])


def _as_video(x: Array) -> Array:
    return x if x.ndim == 5 else x[:, None]


def _match_axes(x: Array, reference: Array) -> Array:
    """x as an image where one was given."""
    return x if reference.ndim == 5 else x[:, 0]
