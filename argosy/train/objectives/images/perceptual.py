"""The perceptual distance of two images, by the features of a frozen net (LPIPS).

    d(x, y) = sum over maps l of the mean over positions of sum over channels c of w_lc (u_lc(x) - u_lc(y))^2

u_l is a map of features, scaled to length 1 at each position. Zhang et al. 2018 (arXiv:1801.03924), equation 1, as version 0.1 of the
`lpips` package. The weights w are those of the net's linear layers, which were learned from people's judgments; a net without any
weighs all channels alike. Differences: a position whose features are all zero, or of length `EPS` at most, counts as zero and has no
gradient; in the package, the gradient of zeros is not a number.
"""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from argosy.core.settings import Also, Settings

if TYPE_CHECKING:
    from jaxtyping import Array, Float

# The role of the frozen net.
PERCEPTUAL = "perceptual"
# Added to the length of features, in the package.
EPS = 1e-10


class Perceptual(Settings):
    """The perceptual term of an autoencoder's loss: the distance of features of a frozen net."""

    net: str | None = None
    """The net whose features are compared. torchvision's VGG or a whole LPIPS in one `.safetensors` file; or an autoencoder whose
    encoder gives them, as a folder or a run. None: there is no such term."""
    linear: str | None = None
    """A `.safetensors` file with LPIPS's linear layers for VGG (`lin0.model.1.weight` ...). None: those of `net`, if it has any; else
    all channels weigh alike."""
    weight: Annotated[float, Also("perceptual_weight", "perceptual_scale", "lpips_weight")] = Field(1.0, gt=0)
    """Weight of the distance, beside a weight of 1 for the error of pixels."""

    @model_validator(mode="after")
    def _has_a_net(self) -> "Perceptual":
        if self.net is None and (self.linear is not None or self.weight != 1):
            name = "linear" if self.linear is not None else "weight"
            raise ValueError(f"{name} is set without net: objective.perceptual.net=FILE names the net whose features are compared")
        return self


def perceptual_distance(net: Any, images: "Float[Array, 'B H W C']", others: "Float[Array, 'B H W C']") -> "Float[Array, 'B']":
    """The distance of each image in -1..1 to another.

    Args:
        net: its `maps` are compared, and its `weighted_sum`, if it has that, weights their channels (`models.blocks.vgg`). Gray images
            are read as colors that are equal.
    """
    import jax
    import jax.numpy as jnp

    from argosy.ops.precision import wide

    def unit(x: Any) -> Any:
        squared = jnp.sum(x * x, -1, keepdims=True)
        nonzero = squared > EPS**2
        return jnp.where(nonzero, x / (jnp.sqrt(jnp.where(nonzero, squared, 1)) + EPS), 0)

    def units(images: Any) -> list[Any]:
        if images.shape[-1] == 1:
            images = jnp.repeat(images, net.config.channels, -1)
        return [unit(wide(x)) for x in net.maps(images)]

    weighted_sum = getattr(net, "weighted_sum", lambda level, differences: jnp.sum(differences, -1))
    pairs = zip(units(images), jax.lax.stop_gradient(units(others)), strict=True)
    parts = [jnp.mean(weighted_sum(level, (x - y) ** 2), (1, 2)) for level, (x, y) in enumerate(pairs)]
    return jnp.sum(jnp.stack(parts), 0)
