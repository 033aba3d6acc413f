"""The admin routes, which change a running server: adapters, weights, pauses. They are on a separate port, on the loopback only, and
need a separate key. With `admin.shared` they are on the main port too, with the same key.

Paths and fields are vLLM's. Adapters and weights are read from files below `admin.root`; there is no other transport. A file is read
and checked before anything changes, so a request that fails changes nothing. With several copies of the model, all change together
between two steps, while none computes.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, TypeVar, get_args

from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from argosy.core.errors import ArgosyError
from argosy.infer.engine.adapters import Factors, UnknownAdapter
from argosy.infer.engine.engine import Engine
from argosy.infer.engine.replicas import copy_to_devices
from argosy.infer.engine.updates import WeightUpdate
from argosy.models.parts.weight import Leaves
from argosy.serve.engine.front import PauseMode
from argosy.serve.service import Service
from argosy.serve.settings import AdminSettings
from argosy.web.body import read_json_body
from argosy.web.errors import ApiError, Json, input_error
from argosy.web.fields import Fields

T = TypeVar("T")
MODES: dict[str, PauseMode] = {mode: mode for mode in get_args(PauseMode)}


class LoadAdapter(Fields):
    lora_name: str = Field(min_length=1, max_length=128)
    lora_path: str = Field(min_length=1, max_length=4096)
    load_inplace: bool = False
    is_3d_lora_weight: Literal[False] = False


class UnloadAdapter(Fields):
    lora_name: str = Field(min_length=1, max_length=128)


class FilesOfWeights(Fields):
    path: str = Field(min_length=1, max_length=4096)


class UpdateWeights(Fields):
    update_info: FilesOfWeights


class FinishUpdate(Fields):
    weight_version: str | None = Field(None, min_length=1, max_length=128, pattern="^[!-~]*$")


class UpdateVersion(Fields):
    """The body of /update_weight_version: the name of the weights that are served from now on."""

    new_version: str = Field(min_length=1, max_length=128, pattern="^[!-~]*$")


class AbortRequests(Fields):
    request_ids: list[str] = Field(default_factory=list)


class Admin:
    """The admin routes of a service."""

    def __init__(self, service: Service, settings: AdminSettings):
        self.service, self.front, self.settings = service, service.front, settings
        self.root = None if settings.root is None else Path(settings.root).resolve()
        # One thread, so that files are read one after the other.
        self._files = ThreadPoolExecutor(1, "admin")
        self._one_at_a_time = asyncio.Lock()
        self._update: WeightUpdate | None = None

    def routes(self) -> list[Route]:
        post: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/v1/load_lora_adapter": self.load_adapter,
            "/v1/unload_lora_adapter": self.unload_adapter,
            "/pause": self.pause,
            "/resume": self.resume,
            "/abort_requests": self.abort_requests,
            "/reset_prefix_cache": self.reset_prefix_cache,
            "/init_weight_transfer_engine": self.no_transfer,
            "/start_weight_update": self.start_update,
            "/update_weights": self.update_weights,
            "/finish_weight_update": self.finish_update,
            "/update_weight_version": self.update_version,
        }
        get = {"/is_paused": self.is_paused, "/weight_info": self.weight_info}
        return [
            *(Route(path, route, methods=["POST"]) for path, route in post.items()),
            *(Route(path, route, methods=["GET"]) for path, route in get.items()),
        ]

    # ---------------------------------------------------------------- adapters

    async def load_adapter(self, request: Request) -> Response:
        fields = LoadAdapter.of(await read_json_body(request, self.service.limits))
        name = fields.lora_name
        if name == self.service.name:
            raise ApiError(f"the model itself is called `{name}`", param="lora_name")
        adapters = self.front.engine.adapters
        if adapters is None:
            problem = "this server takes no adapters (its setting `engine.lora.enabled` allows them)"
            raise ApiError(problem, code="unsupported_parameter")
        async with self._one_at_a_time:
            if name in adapters.loaded and not fields.load_inplace:
                problem = f"an adapter `{name}` is loaded already; `load_inplace` replaces it"
                raise ApiError(problem, param="lora_name")
            factors = await self._read(adapters.read, fields.lora_path, "lora_path")
            try:
                await self.front.together(lambda engines: _put(engines, name, factors, fields.load_inplace))
            except ArgosyError as error:
                raise input_error(error, "lora_name") from None
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload_adapter(self, request: Request) -> Response:
        """Unloads an adapter. Running and waiting requests finish with it; new ones are refused."""
        fields = UnloadAdapter.of(await read_json_body(request, self.service.limits))
        async with self._one_at_a_time:
            try:
                await self.front.together(lambda engines: [engine.unload_adapter(fields.lora_name) for engine in engines])
            except UnknownAdapter as error:
                raise ApiError(error.what, status=404, param="lora_name") from None
        return PlainTextResponse(f"Success: LoRA adapter '{fields.lora_name}' removed successfully.")

    # ---------------------------------------------------------------- pauses

    async def pause(self, request: Request) -> Response:
        query = _query(request, "mode", "clear_cache")
        clear, modes = _switch(query, "clear_cache", True), MODES
        if (mode := modes.get(query.get("mode", "abort"))) is None:
            raise ApiError(f"`mode` is {', '.join(modes)}", param="mode")
        await self.front.pause(mode)
        if clear and mode != "keep":
            await self.front.together(lambda engines: _reset(engines, running=False))
        return Json({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        _query(request)
        await self.front.resume()
        return Json({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        return Json({"is_paused": self.front.paused})

    async def abort_requests(self, request: Request) -> Response:
        fields = AbortRequests.of(await read_json_body(request, self.service.limits))
        return Json({"status": "aborted", "aborted": self.front.abort(fields.request_ids or None)})

    async def reset_prefix_cache(self, request: Request) -> Response:
        query = _query(request, "reset_running_requests", "reset_external")
        running = _switch(query, "reset_running_requests", False)
        if _switch(query, "reset_external", False):
            raise ApiError("`reset_external`: there is no cache outside of the engine", param="reset_external")
        return Json({"success": await self.front.together(lambda engines: _reset(engines, running=running))})

    # ---------------------------------------------------------------- weights

    async def no_transfer(self, request: Request) -> Response:
        problem = "weights come from files: there is no transfer engine to start; `update_info` of /update_weights has a `path`"
        raise ApiError(problem, code="unsupported_parameter")

    async def start_update(self, request: Request) -> Response:
        """Begins an update of the weights. Drops the weights that an unfinished update has read."""
        async with self._one_at_a_time:
            try:
                self._update = WeightUpdate(self.front.engine.model, self.front.engine.context)
            except ArgosyError as error:
                raise input_error(error) from None
        return Json({"message": "Weight update started"})

    async def update_weights(self, request: Request) -> Response:
        fields = UpdateWeights.of(await read_json_body(request, self.service.limits))
        async with self._one_at_a_time:
            update = self._begun()
            count = await self._read(update.add, fields.update_info.path, "update_info")
        return Json({"message": "Weights updated", "weights": count})

    async def finish_update(self, request: Request) -> Response:
        """Replaces the weights between two steps. Running completions go on with the new weights from their next token."""
        fields = FinishUpdate.of(await read_json_body(request, self.service.limits, may_be_empty=True))
        async with self._one_at_a_time:
            update = self._begun()
            if not len(update):
                raise ApiError("no weights were read since /start_weight_update")
            engines = self.front.engines
            leaves = await asyncio.get_running_loop().run_in_executor(self._files, lambda: _for_each(engines, update))

            def swapped(engines: Sequence[Engine]) -> None:
                for engine, weights in zip(engines, leaves, strict=True):
                    engine.swap_weights(weights)
                self.front.prompts.forget()
                if fields.weight_version is not None:
                    self.service.weight_version = fields.weight_version

            await self.front.together(swapped)
            self._update = None
        return Json({"message": "Weight update finished"})

    def _begun(self) -> WeightUpdate:
        if self._update is None:
            raise ApiError("no update has begun: /start_weight_update comes first", status=409)
        return self._update

    async def update_version(self, request: Request) -> Response:
        fields = UpdateVersion.of(await read_json_body(request, self.service.limits))
        self.service.weight_version = fields.new_version
        return Json({"success": True, "new_version": fields.new_version})

    async def weight_info(self, request: Request) -> Response:
        return Json({"weight_version": self.service.weight_version})

    # ---------------------------------------------------------------- files

    def _allowed(self, path: str, param: str) -> Path:
        """Resolves a path of a request, which must be below the root. Slow for large folders, because every symbolic link in them is
        checked.

        Args:
            path: an absolute path, or one relative to the root.
            param: the field that it came in, for errors.

        Raises:
            ApiError: the path or a link is not below the root, or the server has no root.
        """
        if self.root is None:
            problem = "this server reads no files for requests (its setting `admin.root` allows a folder)"
            raise ApiError(problem, status=403, param=param)
        try:
            target = (self.root / path).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):
            target = None
        # The error is the same in both cases, so that it does not reveal which files exist elsewhere.
        if target is None or not target.is_relative_to(self.root):
            raise ApiError(f"`{param}`: nothing of this name below the allowed folder", status=404, param=param)
        for folder, folders, files in os.walk(target):
            links = (child for name in (*folders, *files) if (child := Path(folder, name)).is_symlink())
            if not all(link.resolve().is_relative_to(self.root) for link in links):
                raise ApiError(f"`{param}`: it has links that lead out of the allowed folder", param=param)
        return target

    async def _read(self, work: Callable[[Path], T], path: str, param: str) -> T:
        """Calls `work` with the path of a request, in the thread that reads files. Errors do not name the root folder."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._files, lambda: work(self._allowed(path, param)))
        except ArgosyError as error:
            refusal = input_error(error, param)
            if self.root is not None and str(self.root) in refusal.message:
                refusal = ApiError(refusal.message.replace(f"{self.root}/", "").replace(str(self.root), "."), param=param)
            raise refusal from None
        except OSError as error:
            raise ApiError(f"`{param}`: {(error.strerror or 'it cannot be read').lower()}", param=param) from None


def _put(engines: Sequence[Engine], name: str, factors: Factors, replace: bool) -> None:
    """Loads an adapter into all engines, or into none if one of them has no free place.

    Raises:
        BadInput: as `Adapters.put`.
    """
    banks = [engine.adapters for engine in engines if engine.adapters is not None]
    for bank in banks:
        bank.place_for(name, replace=replace)
    for bank in banks:
        bank.put(name, factors, replace=replace)


def _reset(engines: Sequence[Engine], *, running: bool) -> bool:
    """Clears the prefix caches of all engines, as `Engine.reset_prefix_cache`, or of none. Returns whether it did."""
    if not running and not all(engine.scheduler.is_empty for engine in engines):
        return False
    for engine in engines:
        engine.reset_prefix_cache(running=running)
    return True


def _for_each(engines: Sequence[Engine], update: WeightUpdate) -> list[Leaves]:
    """Copies the weights of an update to the devices of each engine."""
    first = update.leaves()
    return [first, *(copy_to_devices(first, engine.runner.devices) for engine in engines[1:])]


def _query(request: Request, *names: str) -> dict[str, str]:
    """The query parameters of a request.

    Args:
        names: the allowed parameters.

    Raises:
        ApiError: there is another parameter.
    """
    query = dict(request.query_params)
    if strange := sorted(set(query) - set(names)):
        raise ApiError(f"unknown parameter `{strange[0][:64]}`", param=strange[0][:64], code="unknown_parameter")
    return query


def _switch(query: dict[str, str], name: str, default: bool) -> bool:
    value = query.get(name, str(default)).lower()
    if value not in ("true", "false", "1", "0"):
        raise ApiError(f"`{name}` is true or false", param=name)
    return value in ("true", "1")
