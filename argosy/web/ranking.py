"""The answers of vLLM's /score and /rerank, whatever model scored."""

from collections.abc import Sequence
from typing import Any

from argosy.core.counts import plural
from argosy.web.errors import ApiError
from argosy.web.fields import RerankFields


def check_counts(first: Sequence[str], second: Sequence[str]) -> None:
    """Checks that texts can be scored in pairs: one against each of several, or two equally long lists.

    Raises:
        ApiError: they cannot.
    """
    if len(first) not in (1, len(second)):
        problem = f"{plural(len(first), 'text')} in `text_1` and {len(second)} in `text_2`: give one `text_1`, or as many as `text_2`"
        raise ApiError(problem, param="text_1")


def score_response(scores: Sequence[float]) -> dict[str, Any]:
    """The answer of /score."""
    return {"object": "list", "data": [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]}


def rerank_response(scores: Sequence[float], fields: RerankFields) -> dict[str, Any]:
    """The answer of /rerank: the best documents first. Equally good documents keep their order."""
    best = sorted(range(len(scores)), key=lambda i: -scores[i])[: fields.top_n or None]
    return {"results": [{"index": i, "document": {"text": fields.documents[i]}, "relevance_score": scores[i]} for i in best]}
