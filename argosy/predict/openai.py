"""OpenAI's embeddings API, for models whose default signature embeds texts."""

import asyncio
import base64
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from argosy.core.errors import BadInput
from argosy.export.steps import TokenizeStep
from argosy.predict.repository import LoadedVersion
from argosy.predict.service import PredictService
from argosy.web.body import read_body
from argosy.web.errors import ApiError, Json, input_error, unknown_model
from argosy.web.json_text import parsed_object

VECTOR = "embedding"
FIELDS = {"model", "input", "encoding_format", "dimensions", "user", "prompt_name"}


class OpenAIRoutes:
    """The routes /v1/embeddings and /v1/models."""

    def __init__(self, service: PredictService):
        self.service = service

    def routes(self) -> list[Route]:
        return [
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
        ]

    async def models(self, request: Request) -> Response:
        cards = []
        for name, state in self.service.repository.models.items():
            if state.versions:
                created = int(max(version.loaded for version in state.versions.values()))
                cards.append({"id": name, "object": "model", "created": created, "owned_by": "argosy"})
        return Json({"object": "list", "data": cards})

    async def embeddings(self, request: Request) -> Response:
        fields = parsed_object(bytes(await read_body(request, self.service.settings.limits)))
        if unknown := set(fields) - FIELDS:
            raise ApiError(f"unknown field `{min(unknown)[:64]}`", param=min(unknown)[:64], code="unknown_parameter")
        name, texts = fields.get("model"), fields.get("input")
        if not isinstance(name, str):
            raise ApiError("`model` is no name", param="model")
        if name not in self.service.repository.models:
            raise unknown_model(name)
        version = self.service.find(name)
        step = _step(version)
        form = fields.get("encoding_format", "float")
        if form not in ("float", "base64"):
            raise ApiError("`encoding_format` is float or base64", param="encoding_format")
        if fields.get("dimensions") is not None:
            raise ApiError("`dimensions` is not supported: vectors have the size of the model", param="dimensions")
        texts = [texts] if isinstance(texts, str) else texts
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise ApiError("`input` is no text and no list of texts", param="input")
        inputs: dict[str, Any] = {step.input: texts}
        if (prompt := fields.get("prompt_name")) is not None:
            if not step.prompts or not isinstance(prompt, str):
                problem = "`prompt_name` is no text" if step.prompts else f"model `{name}` has no prompts"
                raise ApiError(problem, param="prompt_name")
            inputs[step.prompt_name] = [prompt]
        try:
            arrays = await asyncio.to_thread(version.bundle.preprocessed, version.bundle.manifest.signature(), inputs)
        except BadInput as error:
            raise input_error(error, "input") from None
        _, result = await self.service.call(request, lambda: self.service.find(name), arrays, None)
        vectors = np.asarray(result.outputs[VECTOR], np.float32)
        if not np.isfinite(vectors).all():
            raise ApiError("a vector is not finite", status=500)
        count = int(arrays[step.mask].sum())
        data = [{"object": "embedding", "index": i, "embedding": _encode(vector, form)} for i, vector in enumerate(vectors)]
        return Json({"object": "list", "data": data, "model": name, "usage": {"prompt_tokens": count, "total_tokens": count}})


def _step(version: LoadedVersion) -> TokenizeStep:
    """Returns the step that tokenizes texts."""
    of = version.bundle.manifest.signature()
    step = next((step for step in of.preprocess if isinstance(step, TokenizeStep)), None)
    if step is None or VECTOR not in {spec.name for spec in of.outputs}:
        raise ApiError(f"model `{version.model}` makes no vectors of texts", param="model", code="wrong_kind_of_model")
    return step


def _encode(vector: np.ndarray, form: str) -> Any:
    return vector.tolist() if form == "float" else base64.b64encode(vector.tobytes()).decode()
