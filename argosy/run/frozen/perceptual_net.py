"""The frozen net by whose features an autoencoder's images are compared (`train.objectives.images.perceptual`)."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from argosy.checkpoint.base import ModelRole, check_exists, check_same_weights, describe_base
from argosy.checkpoint.open import open_model
from argosy.checkpoint.run_directory import RunDirectory
from argosy.core.errors import BadInput
from argosy.core.formats.safetensors import SafeTensors
from argosy.core.progress import Say
from argosy.models.vgg import VGGConfig
from argosy.run.frozen.stored import FrozenModel
from argosy.train.objectives.images.perceptual import PERCEPTUAL
from argosy.weights.hub.vgg_files import check_format, linear_names, open_linear, vgg_names, with_linear
from argosy.weights.model import OpenedModel

WHERE = "objective.perceptual.net"
# The files of a run that describe the net, and its linear layers where these are in a file of their own.
NET, LINEAR = "perceptual.json", "perceptual_linear.json"
BACK = "put it back, or start again with dir=NEW"


class PerceptualNet(FrozenModel):
    """The net of a run's perceptual term.

    linear: the file of its linear layers; None: they are in the net's file, or it has none.
    """

    def __init__(self, run: Any, decided: Any, mesh: Any):
        """Raises:
        BadInput, Damaged: there is none, it gives no features, it reads other channels than the run's model, or its linear layers do
            not fit.
        """
        self.settings = run.objective.perceptual
        self.config: Any
        net = open_net(self.settings.net)
        self.linear = None if self.settings.linear is None else _linear_of(self.settings.linear, net)
        super().__init__(run, decided, mesh, net if self.linear is None else with_linear(net, self.linear))
        # Gradients reach the decoder through it.
        self.remat = run.execution.recompute
        if run.model.channels not in (1, self.config.channels):
            problem = f"{self.settings.net} reads images of {self.config.channels} channels, and model.channels = {run.model.channels}"
            raise BadInput(problem, where=WHERE)

    def check_sizes(self, batches: Any) -> None:
        """Checks that images are large enough.

        Args:
            batches: of the run; their images may be of several sizes.

        Raises:
            BadInput: a side is so short that a map of features would have no position.
        """
        for sizes in getattr(batches, "buckets", ()) or (batches.sizes,):
            if min(sizes["h"], sizes["w"]) < self.config.smallest_side:
                problem = f"images of {sizes['w']}x{sizes['h']} pixels, which {self.settings.net} halves until nothing is left"
                raise BadInput(problem, where=WHERE, hint=f"data.image.size={self.config.smallest_side} or more")

    def training_flops(self, pixels: int) -> int:
        """FLOPs for an image of so many pixels: two forward passes, over it and over what is decoded, and a backward pass that reaches
        the decoder. Its weights have no gradient."""
        return 3 * self.config.maps_flops(pixels)

    def settle(self, assembly: Any, directory: RunDirectory, say: Say) -> None:
        """Reads the weights, before the run's first step.

        Raises:
            BadInput: the net or its linear layers are gone, or have changed since the run began.
        """
        _, net = self.same(self.settings.net, directory, say, "the net of this run's perceptual term", NET)
        if self.linear is not None:
            role = ModelRole("the linear layers of this run's perceptual term", BACK, BACK)
            if (recorded := directory.teacher(LINEAR)) is None:
                directory.write_teacher(describe_base(self.linear, self.settings.linear), LINEAR)
            else:
                check_exists(recorded, role)
                check_same_weights(self.linear, recorded, role, thorough=True)
            net = net if net is self.stored else with_linear(net, self.linear)
        kind = "linear layers" if getattr(self.config, "linear", False) else "channels that weigh alike"
        say(f"perceptual term: features of {self.settings.net}, {self.config.parameters():,} parameters, frozen, with {kind}")
        assembly.frozen[PERCEPTUAL] = weights = self.read(net)
        finite = jax.device_get(jax.jit(lambda leaves: {address: jnp.isfinite(a).all() for address, a in leaves.items()})(weights))
        if wrong := sorted(address for address, is_finite in finite.items() if not is_finite):
            problem = f"{self.settings.net} has numbers that are not finite, in {', '.join(wrong[:3])}"
            raise BadInput(problem, where=WHERE, hint="convert it again from the published file")


def open_net(path: str) -> OpenedModel:
    """A net that gives features, without its weights.

    Raises:
        BadInput, Damaged: there is none, or it gives no features.
    """
    check_format(Path(path))
    hint = "torchvision's vgg16 as .safetensors, or an autoencoder (AutoencoderKL) as a folder or a run"
    file = SafeTensors.open(Path(path)) if path.endswith(".safetensors") and Path(path).is_file() else None
    is_vgg = file is not None and bool(vgg_names(file))
    if file is not None and not is_vgg and linear_names(file):
        raise BadInput(f"{path} has linear layers of LPIPS, and no net", where=WHERE, hint=f"objective.perceptual.linear={path}")
    try:
        net = open_model(path)
    except BadInput as error:
        raise BadInput(error.what, where=error.where or WHERE, hint=error.hint if is_vgg else hint) from None
    if not hasattr(net.config, "smallest_side"):
        raise BadInput(f"{path} is a {type(net.config).__name__}, which gives no maps of features", where=WHERE, hint=hint)
    return net


def _linear_of(path: str, net: OpenedModel) -> OpenedModel:
    if not isinstance(net.config, VGGConfig):
        problem = f"linear layers of LPIPS are for VGG, and the net is a {type(net.config).__name__}"
        raise BadInput(problem, where="objective.perceptual.linear", hint="leave it out: all channels then weigh alike")
    return open_linear(path, net.config)
