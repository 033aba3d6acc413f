"""A frozen model whose weights are read from a folder or file: a teacher, or a model of a diffusers folder."""

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
    """A stored model that a run uses frozen. Its weights are read on demand.

    remat: the activations that its layers recompute in the backward pass; "none" unless gradients flow through the model.

    Args:
        config: the config of the model; None: that of the stored model.
    """

    remat: Any = "none"

    def __init__(self, run: Any, decided: Any, mesh: Any, stored: OpenedModel, config: Any = None):
        self.run, self.decided, self.mesh = run, decided, mesh
        self.stored, self.config = stored, config or stored.config

    @cached_property
    def model(self) -> Any:
        """The model without weights. Its layers are scanned or unrolled as the trained model's are."""
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
        """Reads the weights onto the run's devices. Returns them by parameter name."""
        role = self.role
        model = self.config.build(self.decided.run("none"))
        dtype = frozen_dtype(self.stored, self.decided.precision)
        read_into(model, (stored or self.stored).weights, dtype=dtype, place=lambda a: role.shapes[a].sharding)
        return split(model)[1]

    def same(
        self, name: str, directory: RunDirectory, say: Say, model_role: str, record: str = TEACHER
    ) -> tuple[dict[str, Any], OpenedModel]:
        """Checks that the model is the same as when the run began. A new run records the model.

        Args:
            name: the folder or file of the model.
            model_role: the role of the model in the run, for errors.
            record: the file in the run directory that describes the model.

        Returns:
            The recorded description of the model, and the opened model.

        Raises:
            BadInput: the model no longer exists, or has changed since the run began.
        """
        recorded = directory.teacher(record)
        if recorded is None:
            described = describe_base(self.stored, name)
            directory.write_teacher(described, record)
            return described, self.stored
        back = "put it back, or start again with dir=NEW"
        return recorded, open_same(recorded, say, thorough=True, role=ModelRole(model_role, back, back))


def frozen_dtype(stored: OpenedModel, precision: str) -> Any:
    """Returns the type of a frozen model's weights. It is bfloat16 if the run computes in bfloat16 and all weights of the file have
    that type; otherwise None, which stands for float32."""
    types = {str(stored.weights.dtype(name)) for name in stored.weights.names} if precision == "bfloat16" else set()
    return jnp.dtype("bfloat16") if types == {"bfloat16"} else None
