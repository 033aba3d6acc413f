"""Triton's classification extension: converts scores to the best classes.

github.com/triton-inference-server/server (docs/protocol/extension_classification.md): each class is a text, `value:index`, with
`:label` where classes have names.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from argosy.export.manifest import BundleSignature
from argosy.export.steps import LabelsStep, ProbabilitiesStep
from argosy.predict.tensors import TEXT
from argosy.web.errors import ApiError


def class_names(of: BundleSignature, output: str) -> list[str]:
    """Returns the class names of an output; empty if it has none."""
    steps = [step for step in of.postprocess if isinstance(step, ProbabilitiesStep | LabelsStep)]
    sources = {output, *(step.scores for step in steps if isinstance(step, ProbabilitiesStep) and step.output == output)}
    return next((step.names for step in steps if step.names and step.scores in sources), [])


def class_count(spec: Mapping[str, Any], parameters: Mapping[str, Any]) -> int | None:
    """Returns the number of best classes that a request asks for; None if it asks for the plain output.

    Args:
        spec: the description of the output in the protocol.
        parameters: the parameters of the output in the request.

    Raises:
        ApiError: the number is invalid, or the output has no classes.
    """
    if (count := parameters.get("classification")) is None:
        return None
    if type(count) is not int or count < 1:
        raise ApiError("parameters.classification is no number of classes")
    if spec["datatype"] == TEXT or len(spec["shape"]) != 2:
        problem = f"output `{spec['name']}` has no scores of classes"
        raise ApiError(f"{problem}: classification is for outputs of shape [batch, classes]")
    return count


def best_classes(of: BundleSignature, output: str, scores: np.ndarray, count: int) -> np.ndarray:
    """Returns the best classes of each row as texts `value:index` or `value:index:label`, [rows, count]."""
    names = class_names(of, output)
    order = np.argsort(-scores, -1, kind="stable")[:, :count]
    ends = [f":{i}:{name}" for i, name in enumerate(names)] or [f":{i}" for i in range(scores.shape[-1])]
    return np.asarray([[f"{row[i]:f}{ends[i]}" for i in best] for row, best in zip(scores, order.tolist(), strict=True)], object)
