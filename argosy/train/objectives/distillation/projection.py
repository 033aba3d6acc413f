"""The projection of distillation, which maps the student's hidden states to the width of the teacher's where the widths differ.

It is one matrix without bias for all pairs of layers, trained with the student (TinyBERT, arXiv:1909.10351, equation 8). It is an
auxiliary module (`train.beside`): checkpoints of the run contain it, loaded or exported models do not.
"""

from typing import Any

from argosy.models.parts.einsum import Einsum
from argosy.models.parts.weight import merge
from argosy.train.beside import PROJECTION
from argosy.train.objectives.distillation.teacher import ROLE


def attach(model: Any, objective: Any, roles: Any) -> None:
    """Adds the projection to a student's module, which is changed in place, if the objective needs one and the widths differ. The
    weights of the projection are not initialized.

    Args:
        roles: the frozen models by role (`run.frozen.role.Role`); one of them is the teacher.
    """
    if PROJECTION not in objective.trained_parts:
        return
    width, other = model.config.width, merge(roles[ROLE].graph, roles[ROLE].shapes).config.width
    if width != other:
        setattr(model, PROJECTION, Einsum("BTD,DO->BTO", {"D": width, "O": other}))
