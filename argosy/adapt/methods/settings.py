"""The methods by which weights are rounded, and their settings. They import no jax, so mistakes are reported at once.

A method takes a weight, its scheme (`adapt.quant.Scheme`) and what calibration data tells of its inputs, and returns the weight in few
bits. It changes neither the format nor the blocks that the scheme names.
"""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from argosy.core.registry import Registry
from argosy.core.settings import Also, Settings

if TYPE_CHECKING:
    from argosy.adapt.calibration.statistics import InputStatistics
    from argosy.adapt.quant import Scheme
    from argosy.models.parts.einsum import Contraction
    from argosy.ops.quantized import Quantized

METHODS = Registry("method")
METHODS.add("nearest", "argosy.adapt.methods.settings:Nearest")
METHODS.add("mse", "argosy.adapt.methods.settings:ScaleSearch")
METHODS.add("gptq", "argosy.adapt.methods.settings:GPTQ")


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
