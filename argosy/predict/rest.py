"""The Open Inference Protocol v2 over HTTP, with Triton's extensions for repositories, statistics and binary tensors.

github.com/kserve/open-inference-protocol (specification/protocol/inference_rest.md); github.com/triton-inference-server/server
(docs/protocol/extension_*.md).
"""

import asyncio
from collections.abc import Mapping
from importlib.metadata import version as package_version
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from argosy.core.errors import BadInput
from argosy.export.manifest import BundleSignature
from argosy.predict.batching import batch_axis
from argosy.predict.repository import LoadedVersion, UnknownVersion
from argosy.predict.service import PredictService
from argosy.predict.tensors import TEXT, datatype_of, read_tensors, to_bytes, to_json
from argosy.web.body import read_body
from argosy.web.errors import ApiError, Json, input_error
from argosy.web.json_text import parsed_object

HEADER_LENGTH = "inference-header-content-length"
EXTENSIONS = ["binary_tensor_data", "model_repository", "statistics", "model_configuration"]


class InferenceRoutes:
    """Routes below /v2."""

    def __init__(self, service: PredictService):
        self.service, self.repository = service, service.repository

    def routes(self) -> list[Route]:
        """In an order in which the first that fits is right."""
        get, post = ["GET"], ["POST"]
        model, version = "/v2/models/{model}", "/v2/models/{model}/versions/{version}"
        both = [(path + end, how, methods) for path in (version, model) for end, how, methods in (
            ("", self.metadata, get), ("/ready", self.model_ready, get), ("/infer", self.infer, post),
            ("/config", self.config, get), ("/stats", self.statistics, get),
        )]  # fmt: skip
        return [
            Route("/v2", self.server, methods=get),
            Route("/v2/health/live", self.live, methods=get),
            Route("/v2/health/ready", self.ready, methods=get),
            Route("/v2/models/stats", self.statistics, methods=get),
            Route("/v2/repository/index", self.index, methods=post),
            Route("/v2/repository/models/{model}/load", self.load, methods=post),
            Route("/v2/repository/models/{model}/unload", self.unload, methods=post),
            *(Route(path, how, methods=methods) for path, how, methods in both),
        ]

    # ---------------------------------------------------------------- the server

    async def server(self, request: Request) -> Response:
        return Json({"name": "argosy", "version": package_version("argosy"), "extensions": EXTENSIONS})

    async def live(self, request: Request) -> Response:
        return Json({"live": True})

    async def ready(self, request: Request) -> Response:
        states = self.repository.models.values()
        ready = not self.service.draining and all(state.versions or state.unloaded for state in states)
        return Json({"ready": ready}, 200 if ready else 503)

    # ---------------------------------------------------------------- a model

    def _found(self, request: Request) -> LoadedVersion:
        return self.service.find(request.path_params["model"], request.path_params.get("version"))

    async def metadata(self, request: Request) -> Response:
        version = self._found(request)
        of = version.bundle.manifest.signature()
        state = self.repository.state(version.model)
        found = {"name": version.model, "versions": [str(n) for n in sorted(state.versions)], "platform": "jax_stablehlo"}
        return Json(found | {"inputs": input_specs(of), "outputs": output_specs(of)})

    async def model_ready(self, request: Request) -> Response:
        version = self._found(request)
        return Json({"name": version.model, "ready": True})

    async def config(self, request: Request) -> Response:
        """The model's configuration, by the names of Triton's."""
        version = self._found(request)
        of, batching = version.bundle.manifest.signature(), version.batcher.settings
        axis = batch_axis(of)
        settings = self.repository.state(version.model).settings
        policy: dict[str, Any] = {"latest": {"num_versions": settings.latest}}
        if settings.versions != "latest":
            policy = {"all": {}} if settings.versions == "all" else {"specific": {"versions": list(settings.versions)}}
        queue = {"max_queue_size": batching.max_queue_size}
        found = {
            "name": version.model,
            "platform": "jax_stablehlo",
            "backend": "argosy",
            "version_policy": policy,
            "max_batch_size": 0 if axis is None else batching.max_batch_size,
            "input": [_configured(one, axis) for one in input_specs(of)],
            "output": [_configured(one, axis) for one in output_specs(of)],
            "dynamic_batching": {
                "preferred_batch_size": list(batching.allowed_batch_sizes),
                "max_queue_delay_microseconds": int(1e3 * batching.max_queue_delay_ms),
                "default_queue_policy": queue,
            },
            "instance_group": [{"kind": "KIND_AUTO", "count": 1}],
        }
        return Json(found)

    async def statistics(self, request: Request) -> Response:
        if "model" in request.path_params:
            versions = [self._found(request)]
        else:
            versions = [version for state in self.repository.models.values() for version in state.versions.values()]
        return Json({"model_stats": [self._statistics(version) for version in versions]})

    def _statistics(self, version: LoadedVersion) -> dict[str, Any]:
        told = self.service.metrics.statistics(version.model, version.version)

        def spent(microseconds: int) -> dict[str, int]:
            return {"count": told["success"], "ns": 1000 * microseconds}

        return {
            "name": version.model,
            "version": str(version.version),
            "inference_count": told["rows"],
            "execution_count": told["batches"],
            "inference_stats": {
                "success": spent(told["request_us"]),
                "queue": spent(told["queue_us"]),
                "compute_infer": spent(told["infer_us"]),
            },
        }

    # ---------------------------------------------------------------- the repository

    async def index(self, request: Request) -> Response:
        asked = await read_body(request, self.service.settings.limits)
        only_ready = bool(parsed_object(bytes(asked)).get("ready")) if asked else False
        found = []
        for name, state in self.repository.models.items():
            for number in sorted({*state.versions, *state.reasons}):
                if number in state.versions:
                    found.append({"name": name, "version": str(number), "state": "READY", "reason": ""})
                elif not only_ready:
                    found.append({"name": name, "version": str(number), "state": "UNAVAILABLE", "reason": state.reasons[number]})
        return Json(found)

    async def load(self, request: Request) -> Response:
        asked = await read_body(request, self.service.settings.limits)
        if asked and (parsed_object(bytes(asked)).get("parameters") or {}):
            raise ApiError("load takes no parameters here: a model's config.yml says how it is served")
        return await self._changed(self.repository.load(request.path_params["model"]))

    async def unload(self, request: Request) -> Response:
        await read_body(request, self.service.settings.limits)
        return await self._changed(self.repository.unload(request.path_params["model"]))

    async def _changed(self, work: Any) -> Response:
        try:
            # A client that goes away does not leave a model half loaded.
            await asyncio.shield(work)
        except UnknownVersion as error:
            raise ApiError(error.message, status=400 if error.status == 404 else error.status) from None
        return Json({})

    # ---------------------------------------------------------------- inference

    async def infer(self, request: Request) -> Response:
        self._found(request)  # before the body is read
        body = await read_body(request, self.service.settings.limits)
        length = request.headers.get(HEADER_LENGTH)
        if length is not None and not (length.isdecimal() and len(length) < 19 and int(length) <= len(body)):
            raise ApiError(f"{HEADER_LENGTH} is `{length[:20]}`, and the body has {len(body)} bytes")
        cut = len(body) if length is None else int(length)
        asked = parsed_object(bytes(body[:cut]))
        parameters = asked.get("parameters") or {}
        try:
            inputs = read_tensors(asked.get("inputs"), memoryview(body)[cut:])
        except BadInput as error:
            raise input_error(error) from None
        signature = parameters.get("signature") if isinstance(parameters, dict) else None
        if signature is not None and not isinstance(signature, str):
            raise ApiError("parameters.signature is no name")
        timeout = parameters.get("timeout") if isinstance(parameters, dict) else None
        if timeout is not None and (type(timeout) is not int or timeout < 0):
            raise ApiError("parameters.timeout is no number of microseconds")
        of = _signature(self._found(request), signature)
        check_types(of, asked["inputs"])
        wanted = _wanted(asked, of, parameters)
        seconds = timeout / 1e6 if timeout else None
        version, found = await self.service.call(request, lambda: self._found(request), inputs, signature, seconds)
        head = {"model_name": version.model, "model_version": str(version.version)}
        if isinstance(asked.get("id"), str):
            head["id"] = asked["id"]
        return _answer(head, found.outputs, wanted)


def _signature(version: LoadedVersion, name: str | None) -> BundleSignature:
    try:
        return version.bundle.manifest.signature(name)
    except BadInput as error:
        raise input_error(error) from None


def check_types(of: BundleSignature, specs: list[dict[str, Any]]) -> None:
    """Checks the declared types of inputs.

    Raises:
        ApiError: one has another type than the signature's.
    """
    known = {spec.name: datatype_of(spec.dtype) for spec in of.inputs} | {step.input: TEXT for step in of.preprocess}
    for one in specs:
        expected = known.get(one["name"])
        if expected is not None and one["datatype"] != expected:
            raise ApiError(f"input `{one['name']}` is {one['datatype'][:32]}, and this model takes {expected}")
        if expected == TEXT and len(one["shape"]) not in (1, 2):
            raise ApiError(f"input `{one['name']}` has shape {one['shape']}, and this model takes [batch]")


def _wanted(asked: dict[str, Any], of: BundleSignature, parameters: Any) -> dict[str, bool]:
    """The outputs that a request asks for, and whether each is sent as bytes."""
    names = [one["name"] for one in output_specs(of)]
    every = bool(parameters.get("binary_data_output")) if isinstance(parameters, dict) else False
    outputs = asked.get("outputs")
    if not outputs:
        return dict.fromkeys(names, every)
    if not isinstance(outputs, list) or not all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in outputs):
        raise ApiError("`outputs` is no list of objects with a name")
    found = {}
    for one in outputs:
        if one["name"] not in names:
            raise ApiError(f"no output `{one['name'][:128]}`; there are {', '.join(names)}")
        own = one.get("parameters") if isinstance(one.get("parameters"), dict) else {}
        if own.get("classification"):
            raise ApiError("the classification extension is not supported")
        found[one["name"]] = bool(own.get("binary_data", every))
    return found


def _answer(head: dict[str, Any], outputs: Mapping[str, Any], wanted: Mapping[str, bool]) -> Response:
    parts, described = [], []
    for name, is_binary in wanted.items():
        if is_binary:
            datatype, shape, data = to_bytes(outputs[name])
            parts.append(data)
            described.append({"name": name, "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": len(data)}})
        else:
            try:
                datatype, shape, values = to_json(outputs[name])
            except BadInput as error:
                raise ApiError(f"`{name}`: {error.what} ({error.hint})", status=500) from None
            described.append({"name": name, "shape": shape, "datatype": datatype, "data": values})
    answer = Json(head | {"outputs": described})
    if not parts:
        return answer
    header = {HEADER_LENGTH: str(len(answer.body))}
    return Response(b"".join([answer.body, *parts]), media_type="application/octet-stream", headers=header)


def input_specs(of: BundleSignature) -> list[dict[str, Any]]:
    """The inputs of a signature as the protocol describes them: those of its steps in place of what the steps make."""
    made = {name for step in of.preprocess for name in (step.tokens, step.mask)}
    found = [{"name": step.input, "datatype": TEXT, "shape": [-1]} for step in of.preprocess]
    plain = [spec for spec in of.inputs if spec.name not in made]
    return found + [{"name": spec.name, "datatype": datatype_of(spec.dtype), "shape": _open(spec.shape)} for spec in plain]


def output_specs(of: BundleSignature) -> list[dict[str, Any]]:
    """The outputs of a signature, those of its steps too."""
    found = [{"name": spec.name, "datatype": datatype_of(spec.dtype), "shape": _open(spec.shape)} for spec in of.outputs]
    names = {one["name"] for one in found}
    return found + [
        {"name": step.output, "datatype": TEXT, "shape": [-1]} for step in of.postprocess if step.output not in names
    ]


def _open(shape: list[int | str]) -> list[int]:
    return [size if isinstance(size, int) else -1 for size in shape]


def _configured(spec: dict[str, Any], axis: str | None) -> dict[str, Any]:
    """An input or output as Triton's configuration has it: without the axis of the batch."""
    kind = "TYPE_STRING" if spec["datatype"] == TEXT else f"TYPE_{spec['datatype']}"
    return {"name": spec["name"], "data_type": kind, "dims": spec["shape"][axis is not None :]}
