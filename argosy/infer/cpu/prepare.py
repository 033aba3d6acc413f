"""The weights of a model as the programs on one CPU take them: layers of stacked weights as views, large matrices packed in panels."""

from typing import Any

from argosy.infer.cpu.panels import PanelPacker, ReplaceWeight, packer_of
from argosy.infer.cpu.views import LayerViews
from argosy.models.parts.weight import Leaves
from argosy.weights.gguf.blocks import Origin


class WeightPreparation:
    """Prepares the weights of one model.

    Args:
        views: runs a model of stacked layers unrolled, over views of its weights.
        panels: packs matrices in panels where that helps.
        replace: called with each packed weight, by the address in the model, so that nothing else need hold the weight itself; None:
            packed weights are copies.
        origin: the blocks of the file that weights were read from, which are packed in their place.
        activations: as in `PanelPacker`.

    model: the model that runs: `model` itself, or unrolled.
    """

    def __init__(
        self,
        model: Any,
        *,
        views: bool = False,
        panels: bool = False,
        replace: ReplaceWeight | None = None,
        origin: Origin | None = None,
        activations: str | None = None,
    ):
        self.views = LayerViews(model) if views else None
        self.model = model if self.views is None else self.views.model
        self.packer: PanelPacker | None = None
        if panels:
            arguments = (replace, origin) if self.views is None else (None, None)
            self.packer = packer_of(self.model, *arguments, activations)

    def __call__(self, weights: Leaves) -> Leaves:
        """The weights of `self.model`. May take some out of `weights`."""
        weights = weights if self.views is None else self.views.of(weights)
        return weights if self.packer is None else self.packer.of(weights)

    def forget(self) -> None:
        """Frees packed weights, because the weights have changed."""
        if self.packer is not None:
            self.packer.forget()
