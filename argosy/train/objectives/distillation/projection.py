"""The projection of distillation: from the student's hidden states to the teacher's, where they differ in width.

One matrix for all pairs of layers, without bias, trained with the student (TinyBERT, arXiv:1909.10351, equation 8). It stands beside
the student (`train.beside`): checkpoints have it, what is loaded or exported does not.
"""

from typing import Any

from argosy.models.parts.einsum import Einsum
from argosy.models.parts.weight import merge
from argosy.train.beside import PROJECTION
from argosy.train.objectives.distillation.teacher import ROLE


def attach(model: Any, objective: Any, roles: Any) -> None:
    """Gives a student's module the projection that its objective needs, without its weights; nothing where it needs none.

    Args:
        roles: the frozen models by role (`run.frozen.role.Role`), the teacher among them.
    """
    if PROJECTION not in objective.trained_parts:
        return
    width, other = model.config.width, merge(roles[ROLE].graph, roles[ROLE].shapes).config.width
    if width != other:
        setattr(model, PROJECTION, Einsum("BTD,DO->BTO", {"D": width, "O": other}))
