"""The routes of an encoder: OpenAI's /v1/embeddings, and vLLM's /score and /rerank, which compare texts by the cosine of embeddings."""

import base64
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from argosy.infer.embed import unit_vectors
from argosy.serve.engine.encoder import EncoderService
from argosy.serve.openai.completions import read_prompts
from argosy.serve.openai.fields import EmbeddingFields
from argosy.web.errors import ApiError
from argosy.web.fields import RerankFields, ScoreFields, VectorFields
from argosy.web.ranking import check_counts, rerank_response, score_response
from argosy.weights.hub.sentence_steps import DOCUMENT_PROMPTS, QUERY_PROMPTS


@dataclass
class EmbeddingJob:
    """One validated request to an encoder.

    fields: the fields of its body.
    prefix: the prefix of the response id.
    rows: the token ids of its texts.
    body: makes the route's part of the response from the pooled vectors of the texts.
    """

    service: EncoderService
    fields: VectorFields
    prefix: str
    rows: Sequence[list[int]]
    body: Callable[[Float[np.ndarray, "N D"]], dict[str, Any]]

    def document(self, vectors: Float[np.ndarray, "N D"]) -> dict[str, Any]:
        """The response, from the pooled vectors of the texts."""
        tokens = sum(map(len, self.rows))
        return {
            "id": f"{self.prefix}-{self.fields.request_id or uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self.service.name,
            **self.body(vectors),
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }


def prepare_embeddings(service: EncoderService, body: Any) -> EmbeddingJob:
    """Validates a body of /v1/embeddings and turns it into a job.

    Raises:
        ApiError: a field is invalid or unsupported.
    """
    fields = EmbeddingFields.of(body)
    service.check_model(fields.model)
    check_dimensions(service, fields.dimensions)
    texts = read_prompts(fields.input, "input")
    options: Any = {"special": fields.add_special_tokens, "prompt_name": fields.prompt_name}
    rows = service.rows(texts, fields.truncate_prompt_tokens, "input", **options)

    def answer(vectors: Float[np.ndarray, "N D"]) -> dict[str, Any]:
        embeddings = service.front.engine.finished(vectors, dimensions=fields.dimensions)
        if fields.encoding_format == "base64":
            encoded: list[Any] = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in embeddings]
        else:
            encoded = embeddings.tolist()
        data = [{"object": "embedding", "index": i, "embedding": embedding} for i, embedding in enumerate(encoded)]
        return {"object": "list", "data": data}

    return EmbeddingJob(service, fields, "embd", rows, answer)


def check_dimensions(service: EncoderService, dimensions: int | None) -> None:
    """Checks that embeddings may be truncated to `dimensions` dimensions. Only models trained for this support it. As in vLLM, their
    config.json has `matryoshka_dimensions` or `is_matryoshka`.

    Raises:
        ApiError: they may not.
    """
    width, hub = service.lm.config.embedding_width, service.lm.hub
    if dimensions in (None, width):
        return
    listed = hub.get("matryoshka_dimensions")
    if not listed and not hub.get("is_matryoshka"):
        problem = f"`dimensions` is not supported: `{service.name}` was not trained for vectors shorter than {width}"
        raise ApiError(problem, param="dimensions", code="unsupported_parameter")
    if dimensions not in (listed or range(1, width + 1)):
        allowed = f"one of {', '.join(map(str, listed))}" if listed else f"1 to {width}"
        raise ApiError(f"`dimensions` is {dimensions}, not {allowed}", param="dimensions")


def prepare_score(service: EncoderService, body: Any) -> EmbeddingJob:
    """Validates a body of /score and turns it into a job. It compares one text with each of several, or two lists of equal length in
    pairs.

    Raises:
        ApiError: a field is invalid or unsupported.
    """
    fields = ScoreFields.of(body)
    service.check_model(fields.model)
    first, second = fields.text_1, fields.text_2
    check_counts(first, second)
    rows = [
        *service.rows(first, fields.truncate_prompt_tokens, "text_1"),
        *service.rows(second, fields.truncate_prompt_tokens, "text_2"),
    ]

    def answer(vectors: Float[np.ndarray, "N D"]) -> dict[str, Any]:
        return score_response(cosines(vectors[: len(first)], vectors[len(first) :]))

    return EmbeddingJob(service, fields, "score", rows, answer)


def prepare_rerank(service: EncoderService, body: Any) -> EmbeddingJob:
    """Validates a body of /rerank and turns it into a job. It ranks documents by their similarity to a query. If the model has prompts
    for queries and documents, they are put before these texts.

    Raises:
        ApiError: a field is invalid or unsupported.
    """
    fields = RerankFields.of(body)
    service.check_model(fields.model)
    steps = service.front.engine.steps
    rows = [
        *service.rows([fields.query], fields.truncate_prompt_tokens, "query", prompt_name=steps.role(QUERY_PROMPTS)),
        *service.rows(fields.documents, fields.truncate_prompt_tokens, "documents", prompt_name=steps.role(DOCUMENT_PROMPTS)),
    ]

    def answer(vectors: Float[np.ndarray, "N D"]) -> dict[str, Any]:
        return rerank_response(cosines(vectors[:1], vectors[1:]), fields)

    return EmbeddingJob(service, fields, "rerank", rows, answer)


def cosines(a: Float[np.ndarray, "#N D"], b: Float[np.ndarray, "N D"]) -> list[float]:
    """The cosine of each pair of vectors. If `a` is a single vector, it is paired with every vector of `b`."""
    return (unit_vectors(a) * unit_vectors(b)).sum(1).tolist()
