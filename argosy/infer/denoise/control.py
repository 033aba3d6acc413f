"""What ControlNets are given for the images of a call: control images, factors on what each adds, and when it acts.

    factors    scale for every skip and the middle; in guess mode scale from 0.1 to 1 evenly in the logarithm, and 0 for rows
               without their prompts
    when       evaluation i of n acts if start <= i / n and (i + 1) / n <= end, as in diffusers
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.infer.denoise.plan import SamplingPlan
from argosy.models.diffusion.base import Conditions
from argosy.models.diffusion.controlnet import ControlNetConfig
from argosy.models.diffusion.unet import UNetConfig

# The largest scale of a ControlNet; the same as that of guidance on the server.
LARGEST_SCALE = 100.0


@dataclass(frozen=True)
class Control:
    """The control of the images of a call, for each ControlNet.

    images: [N Y X 3] in 0..1.
    scales: [R] factors on what is added to each skip, and to the middle.
    null_scales: [R] the same, of rows without their prompts.
    """

    images: Sequence[np.ndarray]
    scales: Sequence[np.ndarray]
    null_scales: Sequence[np.ndarray]

    def put_on(self, conditions: Conditions, null: Conditions | None, rows: slice) -> tuple[Conditions, Conditions | None]:
        """The conditions of some of the images, and of what guidance leads away from, with their control."""
        images = tuple(one[rows] for one in self.images)

        def with_control(base: Conditions, scales: Sequence[np.ndarray]) -> Conditions:
            return base._replace(control=images, control_scale=tuple(np.tile(one, (len(images[0]), 1)) for one in scales))

        return with_control(conditions, self.scales), None if null is None else with_control(null, self.null_scales)


def control_of(configs: Sequence[ControlNetConfig], images: Sequence[np.ndarray], scales: Sequence[float], guess_mode: bool) -> Control:
    """The control of images [N Y X 3], for each ControlNet.

    Raises:
        BadInput: a scale is below 0 or above `LARGEST_SCALE`.
    """
    found = []
    for i, (config, scale) in enumerate(zip(configs, scales, strict=True)):
        if not 0 <= scale <= LARGEST_SCALE:
            problem = f"control_scale = {scale}{numbered_net(i, len(configs))}: 0 to {LARGEST_SCALE:g}"
            raise BadInput(f"{problem}; 1 is what the ControlNet was trained for")
        residuals = len(config.residual_channels) + 1
        found.append((scale * (np.logspace(-1, 0, residuals) if guess_mode else np.ones(residuals))).astype(np.float32))
    return Control(images, found, [0 * one for one in found] if guess_mode else found)


def numbered_net(i: int, count: int) -> str:
    """Which of several ControlNets an error is of, as its end; empty for a single one."""
    return "" if count == 1 else f" of ControlNet {i + 1} of {count}"


def for_each(name: str, argument: Any, count: int) -> list[Any]:
    """An argument of each of so many ControlNets: a sequence, or one for all.

    Raises:
        BadInput: a sequence of another length.
    """
    if not isinstance(argument, Sequence | np.ndarray):
        return [argument] * count
    if len(argument) != count:
        raise BadInput(f"{name}: {len(argument)} of them for {plural(count, 'ControlNet')}", hint="one for each, in their order")
    return list(argument)


def with_span(plan: SamplingPlan, starts: Sequence[float], ends: Sequence[float]) -> SamplingPlan:
    """The plan with the evaluations at which each ControlNet acts.

    Raises:
        BadInput: start and end are not in order within 0..1, or no evaluation lies between them.
    """
    columns, count = [], plan.evaluations
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        span = f"control_start = {start} and control_end = {end}{numbered_net(number, len(starts))}"
        if not 0 <= start < end <= 1:
            raise BadInput(f"{span}: shares of the steps, 0 <= start < end <= 1")
        columns.append([not (i / count < start or (i + 1) / count > end) for i in range(count)])
        if not any(columns[-1]):
            what = f"no evaluation of {count} lies between {span}, so the ControlNet would not act"
            raise BadInput(what, hint="a wider span, or more steps")
    return plan if all(map(all, columns)) else plan._replace(control=np.asarray(columns, np.float32).T)


def check_controlnet(controlnet: Any, unet: Any, factor: int, which: str = "") -> None:
    """Checks that a ControlNet steers a denoiser.

    Args:
        controlnet, unet: their settings.
        factor: an image is so many times as high and wide as its latents.
        which: its number among several, such as " 2 of 3".

    Raises:
        BadInput: it does not.
    """
    if not isinstance(controlnet, ControlNetConfig):
        what = f"controlnet: the model{which} is a {type(controlnet).__name__} and no ControlNet"
        raise BadInput(what, hint="a folder of a ControlNetModel, or a run of `argosy train controlnet`")
    if not isinstance(unet, UNetConfig):
        what = f"controlnet: it steers UNets (Stable Diffusion 1, 2 and XL), and the model is a {type(unet).__name__}"
        raise BadInput(what, hint="leave `controlnet` out")
    names = ("channels", "widths", "layers", "text_width", "pooled_width")
    for name, own, theirs in ((n, getattr(controlnet, n), getattr(unet, n)) for n in names):
        if own != theirs:
            raise BadInput(f"the ControlNet{which} is of another model: its {name} = {own}, and the UNet's {name} = {theirs}")
    if controlnet.factor != factor:
        sizes = f"{controlnet.factor} times as high as latents, and here they are {factor} times as high"
        what = f"the ControlNet{which} is for images {sizes}"
        raise BadInput(what, hint="a ControlNet that was trained with this autoencoder")
