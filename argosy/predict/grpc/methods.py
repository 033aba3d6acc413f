"""The methods of the gRPC services, which convert messages to requests of `predict.protocol` and its replies to messages."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from google.protobuf.json_format import ParseDict

from argosy.core.errors import BadInput
from argosy.predict.grpc.messages import health_proto, inference_proto, parameters_of, read_request, write_response
from argosy.predict.protocol import InferenceProtocol
from argosy.predict.repository import LoadedVersion
from argosy.predict.service import PredictService
from argosy.web.errors import ApiError, input_error

# The seconds between two looks of `Watch`.
WATCH_S = 0.25


class InferenceMethods:
    """The methods by name. Each takes a request and its call, and returns a response or raises `ApiError`."""

    def __init__(self, service: PredictService):
        self.service, self.protocol = service, InferenceProtocol(service)
        self.messages = inference_proto().messages

    def inference(self) -> dict[str, Any]:
        return {
            "ServerLive": self.server_live,
            "ServerReady": self.server_ready,
            "ModelReady": self.model_ready,
            "ServerMetadata": self.server_metadata,
            "ModelMetadata": self.model_metadata,
            "ModelInfer": self.infer,
            "ModelStreamInfer": self.infer_of_stream,
            "ModelConfig": self.config,
            "ModelStatistics": self.statistics,
            "RepositoryIndex": self.index,
            "RepositoryModelLoad": self.load,
            "RepositoryModelUnload": self.unload,
        }

    def health(self) -> dict[str, Any]:
        return {"Check": self.check, "Watch": self.watch}

    def _version(self, name: str, version: str) -> LoadedVersion:
        return self.service.find(name, version or None)

    # ---------------------------------------------------------------- the server and its models

    async def server_live(self, request: Any, call: Any) -> Any:
        return self.messages["ServerLiveResponse"](live=True)

    async def server_ready(self, request: Any, call: Any) -> Any:
        return self.messages["ServerReadyResponse"](ready=self.protocol.ready())

    async def model_ready(self, request: Any, call: Any) -> Any:
        """Whether a model is ready. An unknown model is not ready, as in Triton."""
        try:
            self._version(request.name, request.version)
        except ApiError:
            return self.messages["ModelReadyResponse"](ready=False)
        return self.messages["ModelReadyResponse"](ready=True)

    async def server_metadata(self, request: Any, call: Any) -> Any:
        return ParseDict(self.protocol.server(), self.messages["ServerMetadataResponse"]())

    async def model_metadata(self, request: Any, call: Any) -> Any:
        metadata = self.protocol.metadata(self._version(request.name, request.version))
        return ParseDict(metadata, self.messages["ModelMetadataResponse"]())

    async def config(self, request: Any, call: Any) -> Any:
        config = self.protocol.config(self._version(request.name, request.version))
        return ParseDict({"config": config}, self.messages["ModelConfigResponse"]())

    async def statistics(self, request: Any, call: Any) -> Any:
        version = self._version(request.name, request.version) if request.name else None
        return ParseDict(self.protocol.statistics(version), self.messages["ModelStatisticsResponse"]())

    # ---------------------------------------------------------------- the repository

    async def index(self, request: Any, call: Any) -> Any:
        return ParseDict({"models": self.protocol.index(request.ready)}, self.messages["RepositoryIndexResponse"]())

    async def load(self, request: Any, call: Any) -> Any:
        await self.protocol.load(request.model_name, parameters_of(request.parameters))
        return self.messages["RepositoryModelLoadResponse"]()

    async def unload(self, request: Any, call: Any) -> Any:
        await self.protocol.unload(request.model_name, parameters_of(request.parameters))
        return self.messages["RepositoryModelUnloadResponse"]()

    # ---------------------------------------------------------------- inference

    async def infer(self, request: Any, call: Any) -> Any:
        def find() -> LoadedVersion:
            return self._version(request.model_name, request.model_version)

        find()  # before the tensors are read
        try:
            infer_request = read_request(request)
        except BadInput as error:
            raise input_error(error) from None
        response = await self.protocol.infer(infer_request, find, seconds=call.time_remaining())
        return write_response(response, request.id)

    async def infer_of_stream(self, request: Any, call: Any) -> Any:
        """Returns the response to one request of a stream. An error is sent as a message, and the stream goes on."""
        message = self.messages["ModelStreamInferResponse"]()
        try:
            message.infer_response.CopyFrom(await self.infer(request, call))
        except ApiError as error:
            message.error_message = error.message
            message.infer_response.id = request.id
        return message

    # ---------------------------------------------------------------- health

    async def check(self, request: Any, call: Any) -> Any:
        if request.service not in ("", inference_proto().service):
            raise ApiError(f"unknown service `{request.service[:128]}`", status=404)
        return self._status()

    async def watch(self, request: Any) -> AsyncIterator[Any]:
        """Yields the status of a service, and then every change of it. Ends when the server drains, because draining would otherwise
        wait for this call."""
        last = None
        while True:
            is_known = request.service in ("", inference_proto().service)
            status = self._status() if is_known else health_proto().messages["HealthCheckResponse"](status="SERVICE_UNKNOWN")
            if status != last:
                yield status
                last = status
            if self.service.draining:
                return
            await asyncio.sleep(WATCH_S)

    def _status(self) -> Any:
        return health_proto().messages["HealthCheckResponse"](status="SERVING" if self.protocol.ready() else "NOT_SERVING")
