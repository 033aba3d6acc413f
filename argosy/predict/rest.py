"""The Open Inference Protocol v2 over HTTP, with binary tensors and Triton's extensions. `predict.protocol` computes the responses.

github.com/kserve/open-inference-protocol (specification/protocol/inference_rest.md).
"""

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from argosy.core.errors import BadInput
from argosy.export.steps import DecodeImageStep, TokenizeStep
from argosy.predict.padding import batch_axis
from argosy.predict.protocol import InferenceProtocol, InferRequest, InferResponse, input_specs, optional_field
from argosy.predict.repository import LoadedVersion
from argosy.predict.service import PredictService
from argosy.predict.tensors import DATATYPES, TEXT, read_tensors, to_bytes, to_json
from argosy.web.body import read_body
from argosy.web.errors import ApiError, Json, input_error
from argosy.web.json_text import parsed_object

HEADER_LENGTH = "inference-header-content-length"


class InferenceRoutes:
    """The routes below /v2."""

    def __init__(self, service: PredictService):
        self.service, self.protocol = service, InferenceProtocol(service)

    def routes(self) -> list[Route]:
        """Returns the routes, in an order in which the first match is right."""
        get, post = ["GET"], ["POST"]
        model, version = "/v2/models/{model}", "/v2/models/{model}/versions/{version}"
        both = [(path + end, endpoint, methods) for path in (version, model) for end, endpoint, methods in (
            ("", self.metadata, get), ("/ready", self.model_ready, get), ("/infer", self.infer, post),
            ("/config", self.config, get), ("/stats", self.statistics, get),
        )]  # fmt: skip
        return [
            Route("/v2", self.server, methods=get),
            Route("/v2/", self.server, methods=get),
            Route("/v2/health/live", self.live, methods=get),
            Route("/v2/health/ready", self.ready, methods=get),
            Route("/v2/models/stats", self.statistics, methods=get),
            Route("/v2/repository/index", self.index, methods=post),
            Route("/v2/repository/models/{model}/load", self.load, methods=post),
            Route("/v2/repository/models/{model}/unload", self.unload, methods=post),
            *(Route(path, endpoint, methods=methods) for path, endpoint, methods in both),
        ]

    async def server(self, request: Request) -> Response:
        return Json(self.protocol.server())

    async def live(self, request: Request) -> Response:
        return Json({"live": True})

    async def ready(self, request: Request) -> Response:
        ready = self.protocol.ready()
        return Json({"ready": ready}, 200 if ready else 503)

    # ---------------------------------------------------------------- a model

    def _version(self, request: Request) -> LoadedVersion:
        return self.service.find(request.path_params["model"], request.path_params.get("version"))

    async def metadata(self, request: Request) -> Response:
        return Json(self.protocol.metadata(self._version(request)))

    async def model_ready(self, request: Request) -> Response:
        return Json({"name": self._version(request).model, "ready": True})

    async def config(self, request: Request) -> Response:
        return Json(self.protocol.config(self._version(request)))

    async def statistics(self, request: Request) -> Response:
        return Json(self.protocol.statistics(self._version(request) if "model" in request.path_params else None))

    # ---------------------------------------------------------------- the repository

    async def index(self, request: Request) -> Response:
        return Json(self.protocol.index(optional_field(await self._body_fields(request), "ready", bool) or False))

    async def load(self, request: Request) -> Response:
        parameters = optional_field(await self._body_fields(request), "parameters", dict) or {}
        await self.protocol.load(request.path_params["model"], parameters)
        return Json({})

    async def unload(self, request: Request) -> Response:
        parameters = optional_field(await self._body_fields(request), "parameters", dict) or {}
        await self.protocol.unload(request.path_params["model"], parameters)
        return Json({})

    async def _body_fields(self, request: Request) -> dict[str, Any]:
        """Returns the JSON object in a body; empty if there is no body."""
        raw = await read_body(request, self.service.settings.limits)
        return parsed_object(bytes(raw)) if raw else {}

    # ---------------------------------------------------------------- inference

    async def infer(self, request: Request) -> Response:
        self._version(request)  # before the body is read
        body = await read_body(request, self.service.settings.limits)
        length = request.headers.get(HEADER_LENGTH)
        if length is not None and not (length.isdecimal() and len(length) < 19 and int(length) <= len(body)):
            raise ApiError(f"{HEADER_LENGTH} is `{length[:20]}`, and the body has {len(body)} bytes")
        cut = len(body) if length is None else int(length)
        is_image = request.headers.get("content-type", "").strip().lower().startswith("image/")
        if is_image or not (cut or length is None):
            fields, data = self._raw(request, body, is_image=is_image)
        else:
            fields, data = parsed_object(bytes(body[:cut])), memoryview(body)[cut:]
        try:
            arrays = read_tensors(fields.get("inputs"), data)
        except BadInput as error:
            raise input_error(error) from None
        if is_image:
            # A file whose bytes happen to be UTF-8 is no text in base64.
            arrays = {name: [bytes(body)] for name in arrays}
        name = optional_field(fields, "id", str)
        infer_request = InferRequest(fields["inputs"], arrays, optional_field(fields, "parameters", dict) or {}, _outputs(fields))
        response = await self.protocol.infer(infer_request, lambda: self._version(request), request)
        head = {"model_name": response.version.model, "model_version": str(response.version.version)}
        return _answer(head if name is None else head | {"id": name}, response)

    def _raw(self, request: Request, body: bytearray, *, is_image: bool) -> tuple[dict[str, Any], memoryview]:
        """Reads a body that consists only of the bytes of a model's only input: one row with at most one further open size, one text,
        or one image file. Returns the fields of the request, and the bytes of the tensor.

        Args:
            is_image: whether the content type of the body is that of an image. The answer is then JSON.
        """
        of, size = self._version(request).bundle.manifest.signature(), len(body)
        files = {step.input for step in of.preprocess if isinstance(step, DecodeImageStep)}
        if is_image and not files:
            raise ApiError("this model takes no image files", status=415)
        optional = {step.prompt_name for step in of.preprocess if isinstance(step, TokenizeStep)}
        specs = [spec for spec in input_specs(of) if spec["name"] not in optional]
        if len(specs) != 1:
            raise ApiError(f"a body without JSON is for models with one input; this one has {len(specs)}")
        (spec,) = specs
        if spec["datatype"] == TEXT:
            # The form of an element in the binary extension: its length, then its bytes.
            data = memoryview(struct.pack("<I", size) + body)
            tensor = {"name": spec["name"], "datatype": TEXT, "shape": [1], "parameters": {"binary_data_size": len(data)}}
            return {"inputs": [tensor], "parameters": {"binary_data_output": not is_image}}, data
        shape = [1, *spec["shape"][1:]] if batch_axis(of) is not None else list(spec["shape"])
        if shape.count(-1) > 1:
            raise ApiError(f"a body without JSON does not tell the open sizes of {spec['shape']}")
        row = abs(int(np.prod(shape, dtype=np.int64))) * DATATYPES[spec["datatype"]].itemsize
        shape = [size // row if row and n < 0 else n for n in shape]
        tensor = {"name": spec["name"], "datatype": spec["datatype"], "shape": shape}
        fields = {"inputs": [tensor | {"parameters": {"binary_data_size": size}}], "parameters": {"binary_data_output": True}}
        return fields, memoryview(body)


def _outputs(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the outputs that a body asks for."""
    outputs = optional_field(fields, "outputs", list) or []
    if not all(isinstance(output, dict) and isinstance(output.get("name"), str) for output in outputs):
        raise ApiError("`outputs` is no list of objects with a name")
    return outputs


def _answer(head: dict[str, Any], response: InferResponse) -> Response:
    parts, described = [], []
    for name, value in response.outputs.items():
        if name in response.binary:
            datatype, shape, data = to_bytes(value)
            parts.append(data)
            described.append({"name": name, "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": len(data)}})
        else:
            try:
                datatype, shape, values = to_json(value)
            except BadInput as error:
                # The request could have asked for bytes, so this is not an error of the server.
                raise ApiError(f"`{name}`: {error.what} ({error.hint})") from None
            described.append({"name": name, "shape": shape, "datatype": datatype, "data": values})
    answer = Json(head | {"outputs": described})
    if not parts:
        return answer
    header = {HEADER_LENGTH: str(len(answer.body))}
    return Response(b"".join([answer.body, *parts]), media_type="application/octet-stream", headers=header)
