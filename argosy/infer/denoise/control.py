"""The inputs of ControlNets for the images of a call: control images, factors on their residuals, and the evaluations at which they
act.

    factors    the scale of each residual. In guess mode (UNets) they rise logarithmically from 0.1 to 1 times the scale, and are 0 for
               rows without prompt
    kind       the number of the kind of control, for ControlNets with several kinds
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
from argosy.models.diffusion.controlnets.base import ControlNetSettings
from argosy.models.diffusion.controlnets.kinds import controlnet_kind

# The largest scale of a ControlNet, equal to the server's largest guidance scale.
LARGEST_SCALE = 100.0


@dataclass(frozen=True)
class Control:
    """The inputs of each ControlNet for the images of a call.

    images: control images [N Y X 3] in 0..1, or latents [N H W C] if the ControlNet reads these.
    scales: [R] the factors on its R residuals; for UNets, one for each skip connection, then one for the middle.
    null_scales: [R] the factors for rows without prompt.
    modes: the number of the kind of control, 0 for ControlNets with one kind; None: no ControlNet has several.
    """

    images: Sequence[np.ndarray]
    scales: Sequence[np.ndarray]
    null_scales: Sequence[np.ndarray]
    modes: Sequence[int] | None = None

    def put_on(self, conditions: Conditions, null: Conditions | None, rows: slice) -> tuple[Conditions, Conditions | None]:
        """Adds the control of some images to their conditions with and without prompt. Returns both.

        Args:
            rows: the images that the conditions belong to.
        """
        images = tuple(image[rows] for image in self.images)

        def with_control(base: Conditions, scales: Sequence[np.ndarray]) -> Conditions:
            count = len(images[0])
            modes = None if self.modes is None else tuple(np.full(count, mode, np.int32) for mode in self.modes)
            factors = tuple(np.tile(scale, (count, 1)) for scale in scales)
            return base._replace(control=images, control_scale=factors, control_mode=modes)

        return with_control(conditions, self.scales), None if null is None else with_control(null, self.null_scales)


def control_of(
    configs: Sequence[ControlNetSettings],
    images: Sequence[np.ndarray],
    scales: Sequence[float],
    guess_mode: bool,
    modes: Sequence[int | None],
) -> Control:
    """Makes the inputs of ControlNets. All sequences have an entry for each ControlNet.

    Args:
        configs: the settings of the ControlNets.
        images: the control images [N Y X 3] or latents.
        scales: the strengths.
        modes: the numbers of the kinds of control; None: a ControlNet with one kind.

    Raises:
        BadInput: a scale is below 0 or above `LARGEST_SCALE`, a ControlNet has no guess mode, or a kind of control is missing or
            unknown to its ControlNet.
    """
    factors, kinds = [], []
    for i, (config, scale, mode) in enumerate(zip(configs, scales, modes, strict=True)):
        kinds.append(checked_mode(config, mode, net_suffix(i, len(configs))))
        if guess_mode and not config.guesses:
            raise BadInput(f"guess_mode: ControlNets of {config.steered} have none", hint="leave it out, or `control_scale` below 1")
        if not 0 <= scale <= LARGEST_SCALE:
            problem = f"control_scale = {scale}{net_suffix(i, len(configs))}: 0 to {LARGEST_SCALE:g}"
            raise BadInput(f"{problem}; 1 is what the ControlNet was trained for")
        residuals = config.residual_count
        factors.append((scale * (np.logspace(-1, 0, residuals) if guess_mode else np.ones(residuals))).astype(np.float32))
    has_modes = any(getattr(config, "modes", None) for config in configs)
    return Control(images, factors, [0 * factor for factor in factors] if guess_mode else factors, kinds if has_modes else None)


def checked_mode(config: ControlNetSettings, mode: int | None, which: str) -> int:
    """Returns the number of the kind of control; 0 for a ControlNet with one kind.

    Args:
        which: the end of error messages, from `net_suffix`.

    Raises:
        BadInput: the ControlNet has several kinds but none is chosen, the chosen kind does not exist, or a kind is chosen for a
            ControlNet with one kind.
    """
    modes = getattr(config, "modes", None)
    if modes is None:
        if mode is not None:
            raise BadInput(f"control_mode = {mode}{which}: the ControlNet knows one kind of control", hint="leave out `control_mode`")
        return 0
    if not isinstance(mode, int | np.integer) or isinstance(mode, bool) or not 0 <= mode < modes:
        state = "is missing" if mode is None else f"= {mode}"
        problem = f"control_mode {state}{which}: this ControlNet knows {modes} kinds of control, by their numbers from 0 to {modes - 1}"
        raise BadInput(problem, hint="its page says which number is for edges, which for depths and so on")
    return mode


def remove_shift(config: ControlNetSettings, autoencoder: Any, latents: Any) -> Any:
    """Converts latents of control images to those that a ControlNet reads. As in diffusers, InstantX's ControlNets for Stable Diffusion
    3 read latents without the autoencoder's shift; for others nothing is changed.

    Args:
        autoencoder: the settings of the autoencoder; None: there is none.
    """
    if autoencoder is None or not getattr(config, "zero_pooled", False):
        return latents
    return latents + np.float32(autoencoder.shift * autoencoder.scale)


def check_patches(configs: Sequence[ControlNetSettings], size: tuple[int, int], factor: int) -> None:
    """Checks that the position tables of ControlNets are large enough for images of this height and width.

    Args:
        factor: the ratio of an image's height and width to those of its latents.

    Raises:
        BadInput: a table is too small.
    """
    for i, config in enumerate(configs):
        patch: Any = getattr(config, "patch", 1)
        most = getattr(config, "grid", None)
        if most is not None and max(size) > most * patch * factor:
            problem = f"images of {size[0]} x {size[1]} pixels: the ControlNet{net_suffix(i, len(configs))} reads at most"
            raise BadInput(f"{problem} {most * patch * factor} a side", hint="a smaller size")


def net_suffix(i: int, count: int) -> str:
    """The end of an error message, which says which of several ControlNets it is about; empty for a single one."""
    return "" if count == 1 else f" of ControlNet {i + 1} of {count}"


def for_each(name: str, argument: Any, count: int) -> list[Any]:
    """Returns an argument as a list with a value for each of `count` ControlNets. The argument is a sequence, or one value for all.

    Args:
        name: the name of the argument, for error messages.

    Raises:
        BadInput: the sequence has another length.
    """
    if not isinstance(argument, Sequence | np.ndarray):
        return [argument] * count
    if len(argument) != count:
        raise BadInput(f"{name}: {len(argument)} of them for {plural(count, 'ControlNet')}", hint="one for each, in their order")
    return list(argument)


def with_span(plan: SamplingPlan, starts: Sequence[float], ends: Sequence[float]) -> SamplingPlan:
    """Returns the plan with a column `control` that says at which evaluations each ControlNet acts.

    Args:
        starts, ends: the shares of the steps after which each ControlNet begins and ends to act.

    Raises:
        BadInput: not 0 <= start < end <= 1, or no evaluation lies between start and end.
    """
    columns, count = [], plan.evaluations
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        span = f"control_start = {start} and control_end = {end}{net_suffix(number, len(starts))}"
        if not 0 <= start < end <= 1:
            raise BadInput(f"{span}: shares of the steps, 0 <= start < end <= 1")
        columns.append([not (i / count < start or (i + 1) / count > end) for i in range(count)])
        if not any(columns[-1]):
            problem = f"no evaluation of {count} lies between {span}, so the ControlNet would not act"
            raise BadInput(problem, hint="a wider span, or more steps")
    return plan if all(map(all, columns)) else plan._replace(control=np.asarray(columns, np.float32).T)


def check_controlnet(controlnet: Any, denoiser: Any, factor: int, which: str = "") -> None:
    """Checks that a ControlNet fits a denoiser.

    Args:
        controlnet, denoiser: the settings of the ControlNet and of the denoiser.
        factor: the ratio of an image's height and width to those of its latents.
        which: the ControlNet's number among several, such as " 2 of 3", for error messages.

    Raises:
        BadInput: it does not fit.
    """
    if not isinstance(controlnet, ControlNetSettings):
        problem = f"controlnet: the model{which} is a {type(controlnet).__name__} and no ControlNet"
        raise BadInput(problem, hint="a folder of a ControlNetModel, or a run of `argosy train controlnet`")
    if not isinstance(denoiser, controlnet.steers):
        problem = f"controlnet: it steers {controlnet.steered}, and the model is a {type(denoiser).__name__}"
        kind = controlnet_kind(denoiser)
        raise BadInput(problem, hint="leave `controlnet` out" if kind is None else f"one that steers {kind.steered}")
    noun = "UNet" if not controlnet.reads_latents else "model"
    for name, mine, theirs in ((n, getattr(controlnet, n), getattr(denoiser, n)) for n in controlnet.compared):
        if mine != theirs and not (mine is None and controlnet.reads_latents):
            raise BadInput(f"the ControlNet{which} is of another model: its {name} = {mine}, and the {noun}'s {name} = {theirs}")
    reads: frozenset[str] = getattr(controlnet, "conditions", frozenset())
    if unread := sorted(reads - set(denoiser.conditions)):
        raise BadInput(f"the ControlNet{which} reads {unread[0]}, which the model does not: it is of another model")
    if not controlnet.reads_latents and controlnet.factor != factor:
        sizes = f"{controlnet.factor} times as high as latents, and here they are {factor} times as high"
        problem = f"the ControlNet{which} is for images {sizes}"
        raise BadInput(problem, hint="a ControlNet that was trained with this autoencoder")
