"""Prepares the weights of a model for programs on one CPU: stacked layers become views, and large matrices are packed into panels."""

from typing import Any

from argosy.infer.cpu.panels import PanelPacker, ReplaceWeight, packer_of
from argosy.infer.cpu.views import LayerViews
from argosy.models.parts.weight import Leaves
from argosy.weights.gguf.blocks import Origin


class WeightPreparation:
    """Prepares the weights of one model.

    Args:
        views: whether to run a model with stacked layers unrolled, over views of its weights.
        panels: whether to pack matrices into panels where that makes products faster.
        replace, origin, activations: as in `PanelPacker`. With `views`, `replace` and `origin` are not used.

    model: the model that runs: the given one, or its unrolled form.
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
        """Converts the weights of the given model to those of `self.model`. May remove entries from `weights`."""
        weights = weights if self.views is None else self.views.of(weights)
        return weights if self.packer is None else self.packer.of(weights)

    def forget(self) -> None:
        """Frees the packed weights. Called when the weights have changed."""
        if self.packer is not None:
            self.packer.forget()
