"""The settings of the methods by which weights are rounded. This module does not import jax, so that mistakes are reported at once.

A method takes a weight, its scheme (`adapt.quant.Scheme`) and the statistics of its inputs on calibration data, and returns the
quantized weight. It changes neither the format nor the blocks of the scheme.
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

_WRITES = "loading rounds to nearest; `argosy quantize MODEL OUT preset=w4 method=gptq data.source=FILE` writes a folder to load"
# Answers to settings beside `quantization=PRESET`, which has none: a method takes minutes, and would take them at each start.
AT_LOAD: dict[str, str] = {f"quantization.{name}": _WRITES for name in ("method", "data", "samples", "rotate")}


class RoundingMethod(Settings):
    """A method of rounding weights.

    needs_data: whether the method requires calibration data.
    """

    needs_data: ClassVar[bool] = False

    def quantize(self, of: "Contraction", w: Any, scheme: "Scheme", inputs: "InputStatistics | None") -> "Quantized":
        """Quantizes the weight of one layer.

        Args:
            of: the contraction.
            w: its weight.
            inputs: statistics of its inputs; None if there is no calibration data, or too little.
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
        from argosy.adapt.methods.mse import search_limits

        return scheme.within(of, w, search_limits(of, w, scheme, inputs))


class GPTQ(RoundingMethod):
    """Weights are rounded one input channel after another, and the remaining channels are adjusted to compensate the error in the
    output. Frantar et al. 2022 (arXiv:2210.17323).
    """

    needs_data: ClassVar[bool] = True

    damping: Annotated[float, Also("damp_percent", "dampening_frac", "percdamp")] = Field(0.01, gt=0)
    """Term added to the diagonal of the Hessian, as a share of its mean. Use more for fewer tokens."""
    order: Annotated[Literal["activation", "stored"], Also("act_order", "desc_act", "actorder")] = "activation"
    """Order in which input channels are rounded. activation: largest inputs first, so that the most other channels can compensate for
    them; stored: in the order of the weight. Blocks of scales are the scheme's in either order.
    """
    scales: Literal["mse", "absmax"] = "mse"
    """Source of the scales. mse: as in `method=mse`; absmax: from the largest weight of each block, by the rule's `calibration`."""

    def quantize(self, of: "Contraction", w: Any, scheme: "Scheme", inputs: "InputStatistics | None") -> "Quantized":
        from argosy.adapt.methods.gptq import compensate_rounding
        from argosy.adapt.methods.mse import search_limits

        if inputs is None:
            return scheme.quantize(of, w)
        limits = search_limits(of, w, scheme, inputs) if self.scales == "mse" else scheme.limits(of, w)
        w = compensate_rounding(of, w, scheme, limits, inputs, damping=self.damping, by_activation=self.order == "activation")
        return scheme.within(of, w, limits)


class BalancingMethod(RoundingMethod):
    """A method that first moves scales between neighboring weights, so that the layer computes the same function (`methods.balance`).
    """

    needs_data: ClassVar[bool] = True

    def channel_scales(self, pair: "BalancedPair", readers: "Sequence[BalancedReader]", groups: int) -> "np.ndarray":
        """The scales of the producer's channels, [groups C].

        Args:
            pair: the producer and its readers.
            readers: the readers that are quantized; at least one.
            groups: number of the producer's experts; 1 without experts.
        """
        raise NotImplementedError


class AWQ(BalancingMethod):
    """Channels with large inputs are scaled up before rounding, and their producer is scaled down. Lin et al. 2023 (arXiv:2306.00978).
    """

    steps: Annotated[int, Also("n_grid")] = Field(20, gt=0)
    """Number of exponents between 0 and 1 that are tried."""
    clip: Annotated[bool, Also("apply_clip")] = True
    """Whether the range of each block is searched afterwards, as in `method=mse`."""

    def channel_scales(self, pair: "BalancedPair", readers: "Sequence[BalancedReader]", groups: int) -> "np.ndarray":
        from argosy.adapt.methods.awq import awq_scales

        return awq_scales(pair, readers, groups, self.steps)

    def quantize(self, of: "Contraction", w: Any, scheme: "Scheme", inputs: "InputStatistics | None") -> "Quantized":
        if not self.clip:
            return scheme.quantize(of, w)
        return ScaleSearch().quantize(of, w, scheme, inputs)


class SmoothQuant(BalancingMethod):
    """Outliers of the activations are moved into the weights, for rules that round activations too. Xiao et al. 2022
    (arXiv:2211.10438).
    """

    alpha: Annotated[float, Also("smoothing_strength", "migration_strength")] = Field(0.5, ge=0, le=1)
    """How much of the activations' range is moved into the weights. Use more for activations with larger outliers."""
    rounding: Literal["nearest", "mse", "gptq"] = "nearest"
    """Method by which the scaled weights are rounded: the method of this name."""

    def channel_scales(self, pair: "BalancedPair", readers: "Sequence[BalancedReader]", groups: int) -> "np.ndarray":
        from argosy.adapt.methods.smoothquant import smooth_scales

        return smooth_scales(pair, readers, groups, self.alpha)

    def quantize(self, of: "Contraction", w: Any, scheme: "Scheme", inputs: "InputStatistics | None") -> "Quantized":
        return METHODS[self.rounding]().quantize(of, w, scheme, inputs)
