"""Checks the results of a pipeline's stages for values that are not finite, so that an error names the stage."""

from typing import Any

import jax
import numpy as np

from argosy.core.errors import ArgosyError


def check_finite(stage: str, *trees: Any) -> None:
    """Checks that all values of pytrees are finite.

    Args:
        stage: the name of the stage, for the error message.

    Raises:
        ArgosyError: a value is not finite.
    """
    for leaf in jax.tree.leaves(trees):
        values = np.asarray(leaf, np.float32)
        if not np.isfinite(values).all():
            share = 1 - np.isfinite(values).mean()
            hint = "dtype=float32, if weights and activations are narrower"
            raise ArgosyError(f"{stage} gave numbers that are not finite: {share:.1%} of {leaf.dtype}{list(values.shape)}", hint=hint)
