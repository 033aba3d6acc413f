"""The settings of outer steps, without jax (`train.diloco` makes them)."""

from typing import Annotated

from pydantic import Field

from argosy.core.settings import Also, Settings


class DilocoSettings(Settings):
    """Replicas of the weights that train alone, and outer steps that bring them together (DiLoCo, arXiv:2311.08105;
    docs/guides/sharding.md). Each index of the mesh axis `data` is a replica."""

    every: Annotated[
        int,
        Also("diloco_sync_period"),
        Also("enable_diloco", note="diloco.every=N, with mesh.data or mesh.between.data above 1"),
    ] = Field(0, ge=0)
    """Steps between two outer steps; the paper takes 500. `steps` must be a multiple of it. 0: no replicas, gradients are summed over
    `mesh.data` in every step."""
    lr: Annotated[float, Also("diloco_outer_lr", "outer_lr")] = Field(0.7, gt=0)
    """Learning rate of the outer steps. Below 1, the outer weights move only part of the way to the mean of the replicas."""
    momentum: Annotated[float, Also("diloco_outer_momentum")] = Field(0.9, ge=0, lt=1)
    """Nesterov momentum of the outer steps."""
