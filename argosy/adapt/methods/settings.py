"""The methods by which weights are rounded, and their settings. They import no jax, so mistakes are reported at once.

A method takes a weight, its scheme (`adapt.quant.Scheme`) and what calibration data tells of its inputs, and returns the weight in few
bits. It changes neither the format nor the blocks that the scheme names.
"""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from argosy.core.registry import Registry
from argosy.core.settings import Also, Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from argosy.adapt.calibration.statistics import InputStatistics
    from argosy.adapt.methods.awq import BalancedReader
    from argosy.adapt.methods.balance import BalancedPair
    from argosy.adapt.quant import Scheme
    from argosy.models.parts.einsum import Contraction
    from argosy.ops.quantized import Quantized

METHODS = Registry("method")
METHODS.add("nearest", "argosy.adapt.methods.settings:Nearest")
METHODS.add("mse", "argosy.adapt.methods.settings:ScaleSearch")
METHODS.add("gptq", "argosy.adapt.methods.settings:GPTQ")
METHODS.add("awq", "argosy.adapt.methods.settings:AWQ")
METHODS.add("smoothquant", "argosy.adapt.methods.settings:SmoothQuant")


class RoundingMethod(Settings):
    """How weights are rounded.

    needs_data: whether the method has no meaning without calibration data.
    """

    needs_data: ClassVar[bool] = False

    def quantize(self, of: "Contraction", w: Any, scheme: "Scheme", inputs: "InputStatistics | None") -> "Quantized":
        """A weight in few bits.

        Args:
            w: of one layer.
            inputs: None where there is no calibration data, or too few tokens of it.
        """
        raise NotImplementedError


class Nearest(RoundingMethod):
    """Each weight becomes the nearest number of its format, and scales follow from the largest weight of each block."""

    def quantize(self, of: "Contraction", w: Any, scheme: "Scheme", inputs: "InputStatistics | None") -> "Quantized":
        return scheme.quantize(of, w)


class ScaleSearch(RoundingMethod):
    """Each weight becomes the nearest number of its format. The scale of each block is the one with the smallest squared error, which
    calibration data weights by the mean squares of the inputs."""

    def quantize(self, of: "Contraction", w: Any, scheme: "Scheme", inputs: "InputStatistics | None") -> "Quantized":
        from argosy.adapt.methods.mse import searched

        return scheme.within(of, w, searched(of, w, scheme, inputs))


class GPTQ(RoundingMethod):
    """Weights are rounded one input channel after the other, and the channels that are not rounded yet make up for the error in the
    output. Frantar et al. 2022 (arXiv:2210.17323)."""

    needs_data: ClassVar[bool] = True

    damping: Annotated[float, Also("damp_percent", "dampening_frac", "percdamp")] = Field(0.01, gt=0)
    """Is added to the diagonal of the Hessian, as a share of its mean. More for fewer tokens."""
    order: Annotated[Literal["activation", "stored"], Also("act_order", "desc_act", "actorder")] = "activation"
    """Which input channels are rounded first. activation: those with the largest inputs, for which most others can make up; stored:
    in the order of the weight. Blocks of scales lie as in the scheme in either order."""
    scales: Literal["mse", "absmax"] = "mse"
    """Scales before rounding. mse: as `method=mse` finds them; absmax: from the largest weight of each block, as the rule's
    `calibration` says."""

    def quantize(self, of: "Contraction", w: Any, scheme: "Scheme", inputs: "InputStatistics | None") -> "Quantized":
        from argosy.adapt.methods.gptq import compensated
        from argosy.adapt.methods.mse import searched

        if inputs is None:
            return scheme.quantize(of, w)
        limits = searched(of, w, scheme, inputs) if self.scales == "mse" else scheme.limits(of, w)
        w = compensated(of, w, scheme, limits, inputs, damping=self.damping, by_activation=self.order == "activation")
        return scheme.within(of, w, limits)


class BalancingMethod(RoundingMethod):
    """A method that moves scales between neighboring weights first, so that the layer computes the same (`methods.balance`)."""

    needs_data: ClassVar[bool] = True

    def channel_scales(self, pair: "BalancedPair", readers: "Sequence[BalancedReader]", groups: int) -> "np.ndarray":
        """The scales of the producer's channels, [groups C].

        Args:
            readers: the contractions that are quantized; at least one.
            groups: how many experts the producer has; 1 if none.
        """
        raise NotImplementedError


class AWQ(BalancingMethod):
    """Input channels with large inputs are scaled up before rounding, and what produces them is scaled down. Lin et al. 2023
    (arXiv:2306.00978)."""

    steps: Annotated[int, Also("n_grid")] = Field(20, gt=0)
    """How many exponents between 0 and 1 are tried."""
    clip: Annotated[bool, Also("apply_clip")] = True
    """Searches the range of each block afterwards, as `method=mse` does."""

    def channel_scales(self, pair: "BalancedPair", readers: "Sequence[BalancedReader]", groups: int) -> "np.ndarray":
        from argosy.adapt.methods.awq import awq_scales

        return awq_scales(pair, readers, groups, self.steps)

    def quantize(self, of: "Contraction", w: Any, scheme: "Scheme", inputs: "InputStatistics | None") -> "Quantized":
        if not self.clip:
            return scheme.quantize(of, w)
        return ScaleSearch().quantize(of, w, scheme, inputs)


class SmoothQuant(BalancingMethod):
    """Outliers of the data move into the weights, for rules that round data too. Xiao et al. 2022 (arXiv:2211.10438)."""

    alpha: Annotated[float, Also("smoothing_strength", "migration_strength")] = Field(0.5, ge=0, le=1)
    """How much of the range of the data moves into the weights. More for data with larger outliers."""
    rounding: Literal["nearest", "mse", "gptq"] = "nearest"
    """How the scaled weights are rounded: the methods of these names."""

    def channel_scales(self, pair: "BalancedPair", readers: "Sequence[BalancedReader]", groups: int) -> "np.ndarray":
        from argosy.adapt.methods.smoothquant import smooth_scales

        return smooth_scales(pair, readers, groups, self.alpha)

    def quantize(self, of: "Contraction", w: Any, scheme: "Scheme", inputs: "InputStatistics | None") -> "Quantized":
        return METHODS[self.rounding]().quantize(of, w, scheme, inputs)
