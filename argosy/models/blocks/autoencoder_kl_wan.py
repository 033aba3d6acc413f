"""The module of Wan's autoencoder (`models.autoencoders.autoencoder_kl_wan` has the equations).

A video is processed in pieces: the first frame, then as many frames at a time as one latent frame stands for. The frames that
convolutions keep between pieces are a tuple of arrays. One loop of the compiled program therefore processes any number of pieces, in
the memory of one.
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

# The number of earlier frames that a convolution reads.
BEFORE = 2


class PastFrames:
    """The last frames that each convolution of a network has read, in the order in which the convolutions are called.

    Args:
        before: the frames that were kept of the previous piece. None: this is the first piece.
    """

    def __init__(self, before: tuple[Array, ...] | None = None):
        self.is_first, self._before, self.after = before is None, list(before or ()), list[Array]()

    def joined(self, x: Float[Array, "B F H W C"], count: int = BEFORE) -> Float[Array, "B G H W C"]:
        """Puts the last `count` frames of the previous piece in front of x, or zeros for the first piece. Keeps the last frames."""
        before = jnp.zeros((len(x), count, *x.shape[2:]), x.dtype) if self.is_first else self._before[len(self.after)]
        whole = jnp.concatenate([before, x], 1)
        self.keep(whole, count)
        return whole

    def keep(self, x: Float[Array, "B F H W C"], count: int) -> None:
        """Keeps the last `count` frames of x for the next piece."""
        self.after.append(x[:, -count:])


class AutoencoderKLWan(nnx.Module):
    """Encodes videos or images to latents, and decodes latents. The attribute `dtype` is the type of activations."""

    def __init__(self, config: Any):
        self.config, self.dtype = config, jnp.float32
        grow(self, config.sites(), groups=1, late=True)

    def encode(self, images: Float[Array, "B *F H W 3"]) -> Moments:
        """Computes the mean and log-variance of the latents. A video must have n f + 1 frames, with f the frames of a latent frame."""
        of: Any = self
        x = of.quant_conv(self._in_pieces(self._encoded, _as_video(images).astype(self.dtype), self.config.frame_factor))
        mean, log_variance = jnp.split(_match_axes(x, images).astype(sums_in(x.dtype)), 2, -1)
        return Moments(mean, jnp.clip(log_variance, *LOG_VARIANCE))

    def decode(self, latents: Float[Array, "B *F h w C"]) -> Float[Array, "B *G H W 3"]:
        """Decodes latents to videos or images in about -1..1, without clipping; float32 at least."""
        of: Any = self
        x = self._in_pieces(self._decoded, of.post_quant_conv(_as_video(latents).astype(self.dtype)), 1)
        return _match_axes(x, latents).astype(sums_in(x.dtype))

    def to_latents(self, moments: Moments, noise: Float[Array, "B *F h w C"] | None = None) -> Float[Array, "B *F h w C"]:
        """Returns the latents that denoisers read, normalized: the mean, or a sample if `noise` is given."""
        return self.config.to_latents(moments.mean if noise is None else moments.sample(noise))

    def from_latents(self, latents: Float[Array, "B *F h w C"]) -> Float[Array, "B *F h w C"]:
        """Undoes the normalization of `to_latents`: maps a denoiser's latents to those that `decode` reads."""
        return self.config.from_latents(latents)

    def __call__(self, images: Float[Array, "B *F H W 3"]) -> Float[Array, "B *F H W 3"]:
        """Reconstructs videos or images from the means of their latents."""
        return self.decode(self.encode(images).mean)

    def _in_pieces(self, go: Callable[[Array, PastFrames], Array], x: Float[Array, "B F H W C"], size: int) -> Array:
        """Applies `go` to the first frame, then to `size` frames at a time."""
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
        """Halves height and width. Also halves the number of frames after the first, if the level has a convolution over time."""
        x = by_frame(of.resample[1], x)
        if not hasattr(of, "time_conv"):
            return x
        if past.is_first:
            past.keep(x, 1)
            return x
        return of.time_conv(past.joined(x, 1), 2)

    def _upsampled(self, of: Any, x: Array, past: PastFrames) -> Array:
        """Doubles height and width. Also doubles the number of frames after the first, if the level has a convolution over time."""
        if hasattr(of, "time_conv"):
            if past.is_first:
                # The frames after the first do not read the first frame here, so zeros are kept.
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
        """Computes attention with one head over the positions of each frame."""
        B, H, W, C = x.shape
        q, k, v = (a.reshape(B, H * W, 1, C) for a in jnp.split(of.to_qkv(of.norm(x)), 3, -1))
        attend = Bidirectional.whole_rows(B, H * W)
        y, _ = attend(q, {"k": k, "v": v}, None, HEADS, score=Score(C**-0.5))
        return of.proj(y.reshape(x.shape))

    def _ends(self, of: Any, x: Array, past: PastFrames) -> Array:
        return of.conv_out(past.joined(jax.nn.silu(of.norm_out(x))))


def by_frame(of: Callable[[Array], Array], x: Float[Array, "B F H W C"]) -> Float[Array, "B F h w D"]:
    """Applies a function of images to each frame of videos."""
    y = of(x.reshape(-1, *x.shape[2:]))
    return y.reshape(*x.shape[:2], *y.shape[1:])


def _as_video(x: Array) -> Array:
    return x if x.ndim == 5 else x[:, None]


def _match_axes(x: Array, reference: Array) -> Array:
    """Removes the frame axis of x if `reference` has none, that is, if it is an image."""
    return x if reference.ndim == 5 else x[:, 0]
