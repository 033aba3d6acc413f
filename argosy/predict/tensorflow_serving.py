"""TensorFlow Serving's REST API: status, metadata, `:predict` in rows and in columns, `:classify` and `:regress`.

tensorflow.org/tfx/serving/api_rest. `instances` is a list of rows: values if the model has one input, else objects by input. `inputs`
has whole columns. Responses have the same form, `predictions` or `outputs`, without names if there is one output. `examples` of
`:classify` and `:regress` are rows, objects by feature, and `context` has the features that all rows share.
"""

import base64
import binascii
import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from argosy.core.errors import BadInput
from argosy.export.manifest import BundleSignature
from argosy.export.steps import ProbabilitiesStep
from argosy.predict.classes import class_names
from argosy.predict.openai import VECTOR
from argosy.predict.padding import batch_axis
from argosy.predict.protocol import input_specs, output_specs
from argosy.predict.repository import LoadedVersion
from argosy.predict.service import PredictService
from argosy.predict.tensors import TEXT, text_or_file, to_json
from argosy.web.body import read_body
from argosy.web.errors import ApiError, Json, input_error
from argosy.web.json_text import parsed_object

Handler = Callable[[Request], Awaitable[Response]]
TYPES = {"FP16": "DT_HALF", "FP32": "DT_FLOAT", "FP64": "DT_DOUBLE", "BF16": "DT_BFLOAT16", "BYTES": "DT_STRING"}


class TensorFlowRoutes:
    """The routes below /v1/models."""

    def __init__(self, service: PredictService):
        self.service, self.repository = service, service.repository

    def routes(self) -> list[Route]:
        """Returns the routes, in an order in which the first match is right."""
        routes = []
        for path in ("/v1/models/{model}/versions/{version}", "/v1/models/{model}/labels/{label}", "/v1/models/{model}"):
            routes.append(Route(path + ":predict", _plain_errors(self.predict), methods=["POST"]))
            routes.append(Route(path + ":classify", _plain_errors(self.classify), methods=["POST"]))
            routes.append(Route(path + ":regress", _plain_errors(self.regress), methods=["POST"]))
            routes.append(Route(path + "/metadata", _plain_errors(self.metadata), methods=["GET"]))
            routes.append(Route(path, _plain_errors(self.status), methods=["GET"]))
        return routes

    def _version(self, request: Request) -> LoadedVersion:
        params = request.path_params
        return self.service.find(params["model"], params.get("version"), params.get("label"))

    async def status(self, request: Request) -> Response:
        version = self._version(request)
        state = self.repository.state(version.model)
        is_single = {"version", "label"} & set(request.path_params)
        numbers = [version.version] if is_single else sorted({*state.versions, *state.reasons}, reverse=True)
        ok = {"error_code": "OK", "error_message": ""}
        statuses = []
        for number in numbers:
            if number in state.versions:
                statuses.append({"version": str(number), "state": "AVAILABLE", "status": ok})
            else:
                why = {"error_code": "FAILED_PRECONDITION", "error_message": state.reasons[number]}
                statuses.append({"version": str(number), "state": "END", "status": why})
        return Json({"model_version_status": statuses})

    async def metadata(self, request: Request) -> Response:
        version = self._version(request)
        manifest = version.bundle.manifest
        names = dict.fromkeys([manifest.default, *manifest.signatures])
        signatures = {name: _described(manifest.signature(name)) for name in names}
        definitions = {"serving_default": signatures[manifest.default]} | signatures
        spec = {"name": version.model, "signature_name": "", "version": str(version.version)}
        return Json({"model_spec": spec, "metadata": {"signature_def": {"signature_def": definitions}}})

    async def predict(self, request: Request) -> Response:
        version = self._version(request)
        fields = parsed_object(bytes(await read_body(request, self.service.settings.limits)))
        if unknown := set(fields) - {"signature_name", "instances", "inputs"}:
            raise ApiError(f"unknown field `{min(unknown)[:64]}`; there are signature_name, instances and inputs")
        if ("instances" in fields) == ("inputs" in fields):
            raise ApiError("a request has `instances` or `inputs`")
        of, name = _signature(version, fields.get("signature_name"))
        rows = "instances" in fields
        if rows and batch_axis(of) is None:
            raise ApiError("this signature has no batch: send `inputs`")
        inputs = _columns(of, fields["instances"]) if rows else _inputs_by_name(of, fields["inputs"])
        _, result = await self.service.call(request, lambda: self._version(request), inputs, name)
        outputs = {spec["name"]: _listed(spec["name"], result.outputs[spec["name"]]) for spec in output_specs(of)}
        if not rows:
            return Json({"outputs": next(iter(outputs.values())) if len(outputs) == 1 else outputs})
        if len(outputs) == 1:
            return Json({"predictions": next(iter(outputs.values()))})
        return Json({"predictions": [dict(zip(outputs, row, strict=True)) for row in zip(*outputs.values(), strict=True)]})

    async def classify(self, request: Request) -> Response:
        of, outputs = await self._examples(request)
        name, scores = _scores(of, outputs)
        labels = class_names(of, name) or [str(i) for i in range(scores.shape[-1])]
        return Json({"result": [[[label, score] for label, score in zip(labels, row, strict=True)] for row in scores.tolist()]})

    async def regress(self, request: Request) -> Response:
        of, outputs = await self._examples(request)
        name, scores = _scores(of, outputs)
        if scores.shape[-1] != 1:
            raise ApiError(f"output `{name}` has {scores.shape[-1]} numbers of each row, and a regression has one")
        return Json({"result": scores[:, 0].tolist()})

    async def _examples(self, request: Request) -> tuple[BundleSignature, Mapping[str, Any]]:
        """Computes the examples of a request. Returns the signature and its outputs."""
        version = self._version(request)
        fields = parsed_object(bytes(await read_body(request, self.service.settings.limits)))
        if unknown := set(fields) - {"signature_name", "context", "examples"}:
            raise ApiError(f"unknown field `{min(unknown)[:64]}`; there are signature_name, context and examples")
        examples, context = fields.get("examples"), fields.get("context") or {}
        if not isinstance(examples, list) or not examples or not all(isinstance(example, dict) for example in [context, *examples]):
            raise ApiError("`examples` is no list of objects by feature, or `context` no object")
        of, name = _signature(version, fields.get("signature_name"))
        inputs = _columns(of, [context | example for example in examples])
        _, result = await self.service.call(request, lambda: self._version(request), inputs, name)
        return of, result.outputs


def _signature(version: LoadedVersion, name: Any) -> tuple[BundleSignature, str | None]:
    """Returns the signature that a request names, and its name, None for the default one."""
    name = None if name in (None, "", "serving_default") else str(name)[:64]
    try:
        return version.bundle.manifest.signature(name), name
    except BadInput as error:
        raise input_error(error) from None


def _scores(of: BundleSignature, outputs: Mapping[str, Any]) -> tuple[str, np.ndarray]:
    """Returns the output with scores [rows, classes], and its name. Probabilities are preferred.

    Raises:
        ApiError: there is no such output, or there are several.
    """
    probabilities = [step.output for step in of.postprocess if isinstance(step, ProbabilitiesStep)]
    # The numbers of an embedding are not classes.
    names = probabilities or [s.name for s in of.outputs if len(s.shape) in (1, 2) and "float" in s.dtype and s.name != VECTOR]
    if len(names) != 1:
        raise ApiError("this signature has no single output of scores: send `:predict`")
    scores = np.asarray(outputs[names[0]], np.float32)
    if not np.isfinite(scores).all():
        raise ApiError(f"`{names[0]}` is not finite", status=500)
    return names[0], scores.reshape(len(scores), -1)


def _plain_errors(handler: Handler) -> Handler:
    """Wraps a handler so that errors are sent as {"error": message}."""

    @functools.wraps(handler)
    async def route(request: Request) -> Response:
        try:
            return await handler(request)
        except ApiError as error:
            return Json({"error": error.message}, error.status, error.headers)

    return route


def _columns(of: BundleSignature, instances: Any) -> dict[str, Any]:
    """Converts rows to columns by input."""
    if not isinstance(instances, list) or not instances:
        raise ApiError("`instances` is no list of rows")
    names = [spec["name"] for spec in input_specs(of)]
    if all(isinstance(row, dict) and "b64" not in row for row in instances):
        if any(row.keys() != instances[0].keys() for row in instances):
            raise ApiError("rows of `instances` have different inputs")
        return {name: [_decoded(row[name]) for row in instances] for name in instances[0]}
    required = [spec.name for spec in of.inputs if spec.default is None]
    if len(names) > 1 and len(required) > 1 and not of.preprocess:
        raise ApiError(f"this model has several inputs, so each row is an object of {', '.join(names)}")
    return {names[0]: [_decoded(row) for row in instances]}


def _inputs_by_name(of: BundleSignature, inputs: Any) -> dict[str, Any]:
    """Returns the columns of a request by input."""
    if isinstance(inputs, dict) and "b64" not in inputs:
        return {name: _decoded(value) for name, value in inputs.items()}
    return {input_specs(of)[0]["name"]: _decoded(inputs)}


def _decoded(value: Any) -> Any:
    """Decodes base64 in a value, {"b64": ...}, to a text, or to the bytes of a file."""
    if isinstance(value, dict):
        if set(value) != {"b64"} or not isinstance(value["b64"], str):
            raise ApiError('a value is no number, text, list or {"b64": ...}')
        try:
            return text_or_file(base64.b64decode(value["b64"], validate=True))
        except (binascii.Error, ValueError):
            raise ApiError("a value is no base64") from None
    if isinstance(value, list) and value and any(isinstance(element, dict) for element in value):
        return [_decoded(element) for element in value]
    return value


def _listed(name: str, value: Any) -> list[Any]:
    """Converts an output to nested lists."""
    try:
        kind, shape, flat = to_json(value)
    except BadInput as error:
        raise ApiError(f"`{name}`: {error.what}") from None
    return flat if kind == TEXT else np.asarray(flat, object).reshape(shape).tolist()


def _described(of: BundleSignature) -> dict[str, Any]:
    def tensors(specs: list[dict[str, Any]]) -> dict[str, Mapping[str, Any]]:
        infos = {}
        for spec in specs:
            dims = [{"size": str(size), "name": ""} for size in spec["shape"]]
            kind = TYPES.get(spec["datatype"], f"DT_{spec['datatype']}")
            infos[spec["name"]] = {"dtype": kind, "tensor_shape": {"dim": dims, "unknown_rank": False}, "name": spec["name"]}
        return infos

    return {"inputs": tensors(input_specs(of)), "outputs": tensors(output_specs(of)), "method_name": "tensorflow/serving/predict"}
