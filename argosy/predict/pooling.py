"""vLLM's /classify, /score and /rerank, for bundles that classify texts, score pairs of texts, or embed texts.

The score of a pair is that of a model with one score, as a probability if the bundle computes one, or the cosine of two vectors of an
embedding model. The default signature is used, or the first one that supports the request.
"""

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from argosy.core.errors import BadInput
from argosy.export.manifest import BundleSignature
from argosy.export.steps import ProbabilitiesStep, TokenizePairsStep, TokenizeStep, at_unit_length
from argosy.predict.classes import class_names
from argosy.predict.openai import VECTOR
from argosy.predict.repository import LoadedVersion
from argosy.predict.service import PredictService
from argosy.web.body import read_body
from argosy.web.errors import ApiError, Json, input_error, unknown_model
from argosy.web.fields import ClassifyFields, RerankFields, ScoreFields, VectorFields
from argosy.web.json_text import parsed_object
from argosy.web.ranking import check_counts, rerank_response, score_response
from argosy.weights.hub.sentence_steps import DOCUMENT_PROMPTS, QUERY_PROMPTS

SCORES = "scores"


class PoolingRoutes:
    """The routes /classify, /score and /rerank."""

    def __init__(self, service: PredictService):
        self.service = service

    def routes(self) -> list[Route]:
        paths = {
            self.classify: ("/classify", "/v1/classify"),
            self.score: ("/score", "/v1/score"),
            self.rerank: ("/rerank", "/v1/rerank", "/v2/rerank"),
        }
        return [Route(path, handler, methods=["POST"]) for handler, listed in paths.items() for path in listed]

    async def classify(self, request: Request) -> Response:
        fields = ClassifyFields.of(parsed_object(bytes(await read_body(request, self.service.settings.limits))))
        name = self._model(fields)
        kind = _signature(self.service.find(name), (SCORES,), "classifies no texts")
        outputs, tokens = await self._called(request, name, kind, fields, fields.input)
        probs = _probabilities(self._of(name, kind), outputs)
        labels = class_names(self._of(name, kind), SCORES)
        data = []
        for i, row in enumerate(probs):
            best = int(np.argmax(row))
            label = labels[best] if labels else None
            data.append({"index": i, "label": label, "probs": row.tolist(), "num_classes": len(row)})
        return self._answer("classify", name, fields, {"object": "list", "data": data}, tokens)

    async def score(self, request: Request) -> Response:
        fields = ScoreFields.of(parsed_object(bytes(await read_body(request, self.service.settings.limits))))
        check_counts(fields.text_1, fields.text_2)
        first = fields.text_1 * len(fields.text_2) if len(fields.text_1) == 1 else fields.text_1
        scores, name, tokens = await self._pairs(request, fields, first, fields.text_2)
        return self._answer("score", name, fields, score_response(scores), tokens)

    async def rerank(self, request: Request) -> Response:
        fields = RerankFields.of(parsed_object(bytes(await read_body(request, self.service.settings.limits))))
        queries = [fields.query] * len(fields.documents)
        scores, name, tokens = await self._pairs(request, fields, queries, fields.documents, (QUERY_PROMPTS, DOCUMENT_PROMPTS))
        return self._answer("rerank", name, fields, rerank_response(scores, fields), tokens)

    # ---------------------------------------------------------------- calls

    async def _pairs(
        self,
        request: Request,
        fields: VectorFields,
        first: Sequence[str],
        second: Sequence[str],
        roles: tuple[Sequence[str], Sequence[str]] = ((), ()),
    ) -> tuple[list[float], str, int]:
        """Returns the score of each pair, the name of the model, and the number of tokens that were read.

        Args:
            first, second: the texts of the pairs.
            roles: possible names of the prompts for first and for second texts. An embedding model uses the first name that it has.
        """
        name = self._model(fields)
        kind = _signature(self.service.find(name), (SCORES, VECTOR), "scores no pairs of texts")
        of = self._of(name, kind)
        if VECTOR in {spec.name for spec in of.outputs}:
            prompts = next(step.prompts for step in of.preprocess if isinstance(step, TokenizeStep))
            names = [next((role for role in each if role in prompts), "") for each in roles]
            texts = list(dict.fromkeys([(text, names[i]) for i, each in enumerate((first, second)) for text in each]))
            outputs, tokens = await self._called(request, name, kind, fields, *zip(*texts))
            vectors = dict(zip(texts, at_unit_length(np.asarray(outputs[VECTOR], np.float32))))
            pairs = zip(first, second, strict=True)
            return [float(vectors[a, names[0]] @ vectors[b, names[1]]) for a, b in pairs], name, tokens
        if of.outputs[0].shape[-1] != 1:
            problem = f"model `{name}` has {of.outputs[0].shape[-1]} scores: it classifies"
            raise ApiError(problem, param="model", code="wrong_kind_of_model")
        outputs, tokens = await self._called(request, name, kind, fields, first, second)
        return _probabilities(of, outputs)[:, 0].tolist(), name, tokens

    async def _called(
        self,
        request: Request,
        name: str,
        kind: str,
        fields: VectorFields,
        texts: Sequence[str],
        more: Sequence[str] | None = None,
    ) -> tuple[Mapping[str, Any], int]:
        """Returns the outputs for texts or pairs of texts, and the number of tokens that were read.

        Args:
            more: the second text of each pair, or the names of the prompts of texts.
        """
        if fields.truncate_prompt_tokens not in (None, -1):
            problem = "`truncate_prompt_tokens` is not supported: texts are cut at the longest sequence of the model"
            raise ApiError(problem, param="truncate_prompt_tokens", code="unsupported_parameter")
        version = self.service.find(name)
        of = version.bundle.manifest.signature(kind)
        step = next(step for step in of.preprocess if isinstance(step, TokenizeStep))
        inputs: dict[str, Any] = {step.input: list(texts)}
        if more is not None and isinstance(step, TokenizePairsStep):
            inputs[step.pair] = list(more)
        elif more is not None and step.prompts:
            inputs[step.prompt_name] = list(more)
        try:
            arrays = await asyncio.to_thread(version.bundle.preprocessed, of, inputs)
        except BadInput as error:
            raise input_error(error) from None
        _, result = await self.service.call(request, lambda: self.service.find(name), arrays, kind)
        for output in result.outputs.values():
            if isinstance(output, np.ndarray) and not np.isfinite(np.asarray(output, np.float32)).all():
                raise ApiError("a score is not finite", status=500)
        return result.outputs, int(arrays[step.mask].sum())

    def _of(self, name: str, kind: str) -> BundleSignature:
        return self.service.find(name).bundle.manifest.signature(kind)

    def _model(self, fields: VectorFields) -> str:
        """Returns the model that a request names, or the only model of the server if it names none.

        Raises:
            ApiError: there is no such model, or the request names none of several.
        """
        models = self.service.repository.models
        if fields.model is None and len(models) == 1:
            return next(iter(models))
        if fields.model is None:
            raise ApiError("`model` is missing", param="model", code="missing_required_parameter")
        if fields.model not in models:
            raise unknown_model(fields.model)
        return fields.model

    def _answer(self, prefix: str, name: str, fields: VectorFields, body: dict[str, Any], tokens: int) -> Response:
        usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0, "prompt_tokens_details": None}
        head = {"id": f"{prefix}-{fields.request_id or uuid.uuid4().hex}", "created": int(time.time()), "model": name}
        return Json(head | body | {"usage": usage})


def _signature(version: LoadedVersion, outputs: tuple[str, ...], lacking: str) -> str:
    """Returns the name of a signature that reads texts and has one of these outputs. The default signature is preferred.

    Args:
        lacking: the end of the error if there is no such signature.

    Raises:
        ApiError: there is no such signature.
    """
    manifest = version.bundle.manifest
    for name in dict.fromkeys([manifest.default, *manifest.signatures]):
        of = manifest.signatures[name]
        if any(isinstance(step, TokenizeStep) for step in of.preprocess) and {spec.name for spec in of.outputs} & set(outputs):
            return name
    raise ApiError(f"model `{version.model}` {lacking}", param="model", code="wrong_kind_of_model")


def _probabilities(of: BundleSignature, outputs: Mapping[str, Any]) -> np.ndarray:
    """Returns the probabilities that the bundle computes, or the scores if it computes none."""
    names = [step.output for step in of.postprocess if isinstance(step, ProbabilitiesStep)]
    return np.asarray(outputs[names[0] if names else SCORES], np.float32)
