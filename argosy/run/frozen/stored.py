"""A frozen model beside the trained one, whose weights are read from where they are stored: a teacher, or a part of a pipeline."""

from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from argosy.checkpoint.base import ModelRole, describe_base
from argosy.checkpoint.open import open_same
from argosy.checkpoint.run_directory import TEACHER, RunDirectory
from argosy.core.progress import Say
from argosy.models.parts.weight import Leaves, abstract, logical, split
from argosy.parallel.rules import shardings
from argosy.run.frozen.role import Role
from argosy.weights.fill import read_into
from argosy.weights.model import OpenedModel


class FrozenModel:
    """A stored model, whose weights are read on demand.

    Args:
        config: its settings; None: those of the stored model.

    remat: what its layers compute again in the backward pass; nothing, unless gradients flow through it.
    """

    remat: Any = "none"

    def __init__(self, run: Any, decided: Any, mesh: Any, stored: OpenedModel, config: Any = None):
        self.run, self.decided, self.mesh = run, decided, mesh
        self.stored, self.config = stored, config or stored.config

    @cached_property
    def model(self) -> Any:
        """The model without weights. Its layers run with the trained model's strategy."""
        return self.config.build(self.decided.run(self.remat))

    @cached_property
    def role(self) -> Role:
        shapes, model = abstract(self.model), self.model
        places = shardings(logical(model), {a: s.shape for a, s in shapes.items()}, self.run.mesh.table(), self.mesh)
        dtype = frozen_dtype(self.stored, self.decided.precision)

        def described(address: str, shape: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape.shape, dtype or shape.dtype, sharding=places[address])

        return Role(split(model)[0], {a: described(a, s) for a, s in shapes.items()})

    def read(self, stored: OpenedModel | None = None) -> Leaves:
        """Reads the weights: {address: array}, on the run's devices."""
        role = self.role
        model = self.config.build(self.decided.run("none"))
        dtype = frozen_dtype(self.stored, self.decided.precision)
        read_into(model, (stored or self.stored).weights, dtype=dtype, place=lambda a: role.shapes[a].sharding)
        return split(model)[1]

    def same(
        self, name: str, directory: RunDirectory, say: Say, model_role: str, record: str = TEACHER
    ) -> tuple[dict[str, Any], OpenedModel]:
        """The model as it was when the run began: what is recorded of it, and it.

        Args:
            name: where it is.
            model_role: its role in the run, for errors.
            record: the file of the run that describes it.

        Raises:
            BadInput: it is gone, or it has changed since the run began.
        """
        recorded = directory.teacher(record)
        if recorded is None:
            described = describe_base(self.stored, name)
            directory.write_teacher(described, record)
            return described, self.stored
        back = "put it back, or start again with dir=NEW"
        return recorded, open_same(recorded, say, thorough=True, role=ModelRole(model_role, back, back))


def frozen_dtype(stored: OpenedModel, precision: str) -> Any:
    """The type of a frozen model's weights: bfloat16 if the run computes in it and the file has no more bits; otherwise None, for
    float32."""
    types = {str(stored.weights.dtype(name)) for name in stored.weights.names} if precision == "bfloat16" else set()
    return jnp.dtype("bfloat16") if types == {"bfloat16"} else None
