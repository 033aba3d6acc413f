"""The Open Inference Protocol v2 independent of the transport: computes the responses to requests of REST and gRPC.

Descriptions are dicts with the field names of the protocol, which REST sends as JSON and gRPC as messages.
github.com/kserve/open-inference-protocol (specification/protocol); Triton's extensions for repositories, statistics and configurations:
github.com/triton-inference-server/server (docs/protocol/extension_*.md).
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version as package_version
from typing import Any

from starlette.requests import Request

from argosy.core.errors import BadInput
from argosy.export.manifest import BundleSignature
from argosy.export.steps import ProbabilitiesStep, TokenizeStep
from argosy.predict.classes import best_classes, class_count
from argosy.predict.ensemble import Ensemble
from argosy.predict.padding import batch_axis
from argosy.predict.repository import LoadedVersion, UnknownVersion
from argosy.predict.service import PredictService
from argosy.predict.tensors import TEXT, datatype_of
from argosy.web.errors import ApiError, input_error

EXTENSIONS = ["binary_tensor_data", "classification", "model_repository", "statistics", "model_configuration"]
PLATFORM = "jax_stablehlo"
KINDS = {str: "text", bool: "true or false", dict: "object", list: "list"}


@dataclass(frozen=True)
class InferRequest:
    """A request for inference, from any transport.

    inputs: the name, datatype and shape of each input.
    arrays: the values of the inputs by name.
    parameters: the parameters of the request.
    outputs: the name and parameters of each requested output. Empty requests all outputs.
    """

    inputs: Sequence[Mapping[str, Any]]
    arrays: Mapping[str, Any]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    outputs: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class InferResponse:
    """The response to a request for inference.

    version: the version that computed it.
    outputs: the requested outputs by name.
    binary: the names of the outputs that REST sends as bytes.
    """

    version: LoadedVersion
    outputs: Mapping[str, Any]
    binary: frozenset[str]


class InferenceProtocol:
    """The operations of the protocol. Each may raise `ApiError`, which has an HTTP status."""

    def __init__(self, service: PredictService):
        self.service, self.repository = service, service.repository

    # ---------------------------------------------------------------- the server

    def server(self) -> dict[str, Any]:
        return {"name": "argosy", "version": package_version("argosy"), "extensions": EXTENSIONS}

    def ready(self) -> bool:
        """Whether every model is ready, except those that a request unloaded."""
        states = self.repository.models.values()
        return not self.service.draining and all(state.versions or state.unloaded or state.idle for state in states)

    # ---------------------------------------------------------------- a model

    def metadata(self, version: LoadedVersion) -> dict[str, Any]:
        of = version.bundle.manifest.signature()
        versions = [str(number) for number in sorted(self.repository.state(version.model).versions)]
        facts = {"name": version.model, "versions": versions, "platform": _platform(version)}
        return facts | {"inputs": input_specs(of), "outputs": output_specs(of)}

    def config(self, version: LoadedVersion) -> dict[str, Any]:
        """Returns the configuration of the model, in Triton's names."""
        of, batching = version.bundle.manifest.signature(), version.batcher.settings
        axis = batch_axis(of)
        settings = self.repository.state(version.model).settings
        policy: dict[str, Any] = {"latest": {"num_versions": settings.latest}}
        if settings.versions != "latest":
            policy = {"all": {}} if settings.versions == "all" else {"specific": {"versions": list(settings.versions)}}
        config = {
            "name": version.model,
            "platform": _platform(version),
            "version_policy": policy,
            "max_batch_size": 0 if axis is None else batching.max_batch_size,
            "input": [_configured(spec, axis) for spec in input_specs(of)],
            "output": [_configured(spec, axis) for spec in output_specs(of)],
        }
        if isinstance(version.bundle, Ensemble):
            return config | {"ensemble_scheduling": {"step": _steps(version.bundle)}}
        return config | {
            "backend": "argosy",
            "dynamic_batching": {
                "preferred_batch_size": list(batching.allowed_batch_sizes),
                "max_queue_delay_microseconds": int(1e3 * batching.max_queue_delay_ms),
                "default_queue_policy": {"max_queue_size": batching.max_queue_size},
                "priority_levels": batching.priority_levels,
                "default_priority_level": batching.default_priority_level,
            },
            "instance_group": [{"kind": "KIND_AUTO", "count": batching.instances}],
        }

    def statistics(self, version: LoadedVersion | None) -> dict[str, Any]:
        """Returns the statistics of a version, or for None of all ready versions."""
        every = [loaded for state in self.repository.models.values() for loaded in state.versions.values()]
        return {"model_stats": [self._statistics(loaded) for loaded in ([version] if version else every)]}

    def _statistics(self, version: LoadedVersion) -> dict[str, Any]:
        counts = self.service.metrics.statistics(version.model, version.version)

        def spent(microseconds: int) -> dict[str, int]:
            return {"count": counts["success"], "ns": 1000 * microseconds}

        return {
            "name": version.model,
            "version": str(version.version),
            "last_inference": counts["latest_ms"],
            "inference_count": counts["rows"],
            "execution_count": counts["batches"],
            # Triton's clients read all of these. Copies of tensors are part of `compute_infer`, and there is no cache.
            "inference_stats": {
                "success": spent(counts["request_us"]),
                "fail": {"count": counts["failure"], "ns": 0},
                "queue": spent(counts["queue_us"]),
                "compute_input": spent(0),
                "compute_infer": spent(counts["infer_us"]),
                "compute_output": spent(0),
                "cache_hit": {"count": 0, "ns": 0},
                "cache_miss": {"count": 0, "ns": 0},
            },
            "batch_stats": [],
        }

    # ---------------------------------------------------------------- the repository

    def index(self, only_ready: bool) -> list[dict[str, str]]:
        """Returns every version in the repository, with the reasons why some are not ready."""
        entries = []
        for name, state in self.repository.models.items():
            for number in sorted({*state.versions, *state.reasons}):
                entry = {"name": name, "version": str(number)}
                if number in state.versions:
                    entries.append(entry | {"state": "READY", "reason": ""})
                elif not only_ready:
                    entries.append(entry | {"state": "UNAVAILABLE", "reason": state.reasons[number]})
        return entries

    async def load(self, model: str, parameters: Mapping[str, Any]) -> None:
        if parameters:
            raise ApiError("load takes no parameters here: a model's config.yml says how it is served")
        await self._changed(self.repository.load(model))

    async def unload(self, model: str, parameters: Mapping[str, Any]) -> None:
        await self._changed(self.repository.unload(model, optional_field(parameters, "unload_dependents", bool) or False))

    async def _changed(self, work: Any) -> None:
        if self.service.replicated:
            work.close()
            raise ApiError("this server is one of several replicas: poll=SECONDS loads and unloads in all of them")
        task = asyncio.ensure_future(work)
        # asyncio prints an exception that nobody looked at.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        # A client that goes away does not leave a model half loaded: what is waited for so is not canceled.
        await asyncio.wait({task})
        try:
            task.result()
        except UnknownVersion as error:
            raise ApiError(error.message, status=400 if error.status == 404 else error.status) from None

    # ---------------------------------------------------------------- inference

    async def infer(
        self,
        request: InferRequest,
        find: Callable[[], LoadedVersion],
        connection: Request | None = None,
        seconds: float | None = None,
    ) -> InferResponse:
        """Computes the outputs that a request asks for.

        Args:
            find: returns the requested version.
            connection: the HTTP request. The call ends when its client disconnects. With None, it ends when its task is cancelled.
            seconds: the time limit, if it is shorter than that of the server.
        """
        signature = request.parameters.get("signature")
        if signature is not None and not isinstance(signature, str):
            raise ApiError("parameters.signature is no name")
        timeout = request.parameters.get("timeout")
        if timeout is not None and (type(timeout) is not int or not 0 <= timeout < 1 << 64):
            raise ApiError("parameters.timeout is no number of microseconds below 2**64")
        priority = request.parameters.get("priority", 0)
        if type(priority) is not int:
            raise ApiError("parameters.priority is no whole number")
        of = _signature(find(), signature)
        arrays = {**request.arrays, **_named_prompt(of, request)}
        check_types(of, request.inputs)
        outputs = _outputs_of(request, of)
        classes = _classes_of(request, of)
        limits = [limit for limit in (timeout / 1e6 if timeout else None, seconds) if limit is not None]
        most = min(limits, default=None)
        version, result = await self.service.call(connection, find, arrays, signature, most, priority)
        binary = frozenset(name for name, is_binary in outputs.items() if is_binary)
        answer = {name: result.outputs[name] for name in outputs}
        for name, count in classes.items():
            answer[name] = best_classes(of, name, answer[name], count)
        return InferResponse(version, answer, binary)


def _named_prompt(of: BundleSignature, request: InferRequest) -> dict[str, str]:
    """Returns the input that `parameters.prompt_name` stands for, which names the prompt of every text.

    Raises:
        ApiError: the parameter is not a name, the signature has no prompts, or the request has that input too.
    """
    name = request.parameters.get("prompt_name")
    if name is None:
        return {}
    if not isinstance(name, str):
        raise ApiError("parameters.prompt_name is no name")
    step = next((step for step in of.preprocess if isinstance(step, TokenizeStep) and step.prompts), None)
    if step is None:
        raise ApiError("parameters.prompt_name: this signature has no prompts")
    if step.prompt_name in request.arrays:
        raise ApiError(f"parameters.prompt_name and input `{step.prompt_name}`: one of them")
    return {step.prompt_name: name}


def _platform(version: LoadedVersion) -> str:
    return "ensemble" if isinstance(version.bundle, Ensemble) else PLATFORM


def _steps(ensemble: Ensemble) -> list[dict[str, Any]]:
    """Returns the steps of an ensemble as in Triton's configuration, where version -1 is the newest."""
    steps = []
    for step, inputs, outputs in zip(ensemble.ensemble.steps, ensemble.plan.inputs, ensemble.plan.outputs, strict=True):
        names = {"input_map": dict(inputs), "output_map": dict(outputs)}
        steps.append({"model_name": step.model, "model_version": step.version or -1} | names)
    return steps


def _signature(version: LoadedVersion, name: str | None) -> BundleSignature:
    try:
        return version.bundle.manifest.signature(name if name is None else name[:128])
    except BadInput as error:
        raise input_error(error) from None


def check_types(of: BundleSignature, specs: Sequence[Mapping[str, Any]]) -> None:
    """Checks the declared types of inputs.

    Raises:
        ApiError: a type differs from the signature's.
    """
    datatypes = {spec.name: datatype_of(spec.dtype) for spec in of.inputs}
    datatypes |= {name: TEXT for step in of.preprocess for name in step.texts}
    for spec in specs:
        expected = datatypes.get(spec["name"])
        if expected is not None and spec["datatype"] != expected:
            raise ApiError(f"input `{spec['name']}` is {spec['datatype'][:32]}, and this model takes {expected}")
        # Triton's clients send a column, [batch, 1].
        if expected == TEXT and (not spec["shape"] or list(spec["shape"][1:]) not in ([], [1])):
            raise ApiError(f"input `{spec['name']}` has shape {list(spec['shape'])}, and this model takes [batch]")


def _outputs_of(request: InferRequest, of: BundleSignature) -> dict[str, bool]:
    """Returns the outputs that a request asks for, {name: whether it is sent as bytes}."""
    names = [spec["name"] for spec in output_specs(of)]
    every = optional_field(request.parameters, "binary_data_output", bool) or False
    if not request.outputs:
        return dict.fromkeys(names, every)
    as_bytes = {}
    for output in request.outputs:
        if output["name"] not in names:
            raise ApiError(f"no output `{output['name'][:128]}`; there are {', '.join(names)}")
        parameters = optional_field(output, "parameters", dict) or {}
        if "shared_memory_region" in parameters:
            raise ApiError("shared memory is not supported: send tensors in the request")
        binary = optional_field(parameters, "binary_data", bool)
        as_bytes[output["name"]] = every if binary is None else binary
    return as_bytes


def optional_field(fields: Mapping[str, Any], name: str, kind: type) -> Any:
    """Returns the value of an optional field; None if it is absent or null.

    Raises:
        ApiError: the value has another type.
    """
    value = fields.get(name)
    if value is not None and not isinstance(value, kind):
        raise ApiError(f"`{name}` is no {KINDS[kind]}")
    return value


def _classes_of(request: InferRequest, of: BundleSignature) -> dict[str, int]:
    """Returns the outputs for which a request asks for the best classes, {name: number of classes}."""
    specs = {spec["name"]: spec for spec in output_specs(of)}
    counts = {output["name"]: class_count(specs[output["name"]], output.get("parameters") or {}) for output in request.outputs}
    return {name: count for name, count in counts.items() if count is not None}


def input_specs(of: BundleSignature) -> list[dict[str, Any]]:
    """Returns the inputs of a signature as the protocol describes them. The inputs of steps replace the program inputs that the steps
    produce.
    """
    produced = {name for step in of.preprocess for name in step.results}
    text_specs = [{"name": name, "datatype": TEXT, "shape": [-1]} for step in of.preprocess for name in step.texts]
    plain = [spec for spec in of.inputs if spec.name not in produced]
    return text_specs + [{"name": spec.name, "datatype": datatype_of(spec.dtype), "shape": _open(spec.shape)} for spec in plain]


def output_specs(of: BundleSignature) -> list[dict[str, Any]]:
    """Returns the outputs of a signature as the protocol describes them, including those of its steps."""
    specs = [{"name": spec.name, "datatype": datatype_of(spec.dtype), "shape": _open(spec.shape)} for spec in of.outputs]
    by_name = {spec["name"]: spec for spec in specs}
    for step in of.postprocess:
        if isinstance(step, ProbabilitiesStep):
            by_name[step.output] = by_name[step.scores] | {"name": step.output}
        elif step.output not in by_name:
            by_name[step.output] = {"name": step.output, "datatype": TEXT, "shape": [-1]}
    return list(by_name.values())


def _open(shape: list[int | str]) -> list[int]:
    return [size if isinstance(size, int) else -1 for size in shape]


def _configured(spec: dict[str, Any], axis: str | None) -> dict[str, Any]:
    """Describes an input or output as in Triton's configuration, without the batch axis."""
    kind = "TYPE_STRING" if spec["datatype"] == TEXT else f"TYPE_{spec['datatype']}"
    return {"name": spec["name"], "data_type": kind, "dims": spec["shape"][axis is not None :]}
