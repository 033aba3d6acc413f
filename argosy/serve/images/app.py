"""The routes of a server of images: OpenAI's /v1/images, health, metrics, and the page.

A stream sends OpenAI's events: `image_generation.partial_image` and `image_generation.completed`, or `image_edit.` for edits. With
`progress` it also sends `image_generation.progress`, which OpenAI's API lacks.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from argosy.infer.denoise.engine import ImageEvent
from argosy.infer.denoise.pictures import as_uint8
from argosy.serve.images.fields import ImageFields
from argosy.serve.images.forms import read_edit_form
from argosy.serve.images.service import ImageService
from argosy.serve.sse import EventStream
from argosy.web.app import guarded_app
from argosy.web.body import read_json_body
from argosy.web.connection import while_connected
from argosy.web.errors import ApiError, Json
from argosy.web.pages import page_files, page_routes
from argosy.web.process import is_for_loopback

FOLDER = Path(__file__).parent / "web"


class ImageRoutes:
    """The routes of an image service."""

    def __init__(self, service: ImageService):
        self.service = service

    def app(self) -> Starlette:
        """The HTTP application."""
        settings, get = self.service.settings, ["GET"]
        routes = [
            Route("/v1/images/generations", self.generations, methods=["POST"]),
            Route("/v1/images/edits", self.edits, methods=["POST"]),
            Route("/v1/models", self.models, methods=get),
            Route("/health", self.health, methods=get),
            Route("/version", self.version, methods=get),
            Route("/metrics", self.metrics, methods=get),
        ]
        public: tuple[str, ...] = ()
        if settings.page:
            routes += [*page_routes(FOLDER, settings.api_key is not None), Route("/web/model", self.model, methods=get)]
            public = tuple(page_files(FOLDER))
        options: dict[str, Any] = {"key": settings.api_key, "local": is_for_loopback(settings), "headers": settings.limits.headers}
        return guarded_app(routes, **options, public=public)

    async def generations(self, request: Request) -> Response:
        fields = ImageFields.of(await read_json_body(request, self.service.settings.limits))
        return await self._answer(request, fields, "image_generation")

    async def edits(self, request: Request) -> Response:
        form = await read_edit_form(request, self.service.settings.limits)
        form = await asyncio.to_thread(self.service.fitted, form)
        return await self._answer(request, form.fields, "image_edit", form.image, form.mask)

    async def _answer(self, request: Request, fields: ImageFields, kind: str, image: Any = None, mask: Any = None) -> Response:
        fields.check_format()
        events = self.service.events(fields, image, mask)
        seconds = self.service.settings.limits.seconds
        if fields.stream:
            documents = _documents(events, fields, kind)
            # The first JSON object is taken here, so that errors before it get their own HTTP status.
            first = await while_connected(request.receive, _within(anext(documents), seconds))
            return EventStream(first, documents, seconds, named=True, failure=_failure)
        images = await while_connected(request.receive, _within(_all(events, fields.n), seconds))
        files = await asyncio.to_thread(lambda: [fields.file(as_uint8(image)) for image in images])
        return Json({"created": int(time.time()), "data": [{"b64_json": file} for file in files]} | fields.about(images[0]))

    async def models(self, request: Request) -> Response:
        about = {"id": self.service.name, "object": "model", "created": self.service.created, "owned_by": "argosy"}
        return Json({"object": "list", "data": [about]})

    async def model(self, request: Request) -> Response:
        """Responds with the facts about the model that the page fetches first."""
        pipe = self.service.pipeline
        height, width = pipe.defaults.size
        about = {"name": self.service.name, "width": width, "height": height, "steps": pipe.defaults.steps}
        about |= {"guidance": pipe.defaults.guidance, "multiple": pipe.factor * pipe.config.size_multiple}
        # For each ControlNet the number of kinds of control that it knows; null: one.
        about["controls"] = [getattr(net.config, "modes", None) for net in pipe.controlnets]
        return Json(about, headers={"cache-control": "no-store"})

    async def health(self, request: Request) -> Response:
        return Response(status_code=503 if self.service.draining else 200)

    async def version(self, request: Request) -> Response:
        return Json({"version": version("argosy")})

    async def metrics(self, request: Request) -> Response:
        self.service.metrics.waiting.set(len(self.service.engine.waiting))
        return Response(self.service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _within(work: Any, seconds: float) -> Any:
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise ApiError(f"the request took more than {seconds:g} seconds", status=504, code="timeout") from None


async def _all(events: AsyncGenerator[tuple[int, ImageEvent]], count: int) -> list[Any]:
    """Waits for all images of a request, and returns them in order."""
    images: list[Any] = [None] * count
    try:
        async for number, event in events:
            if event.kind == "image":
                images[number] = event.image
    finally:
        await events.aclose()
    return images


async def _documents(events: AsyncGenerator[tuple[int, ImageEvent]], fields: ImageFields, kind: str) -> AsyncGenerator[Any]:
    """Yields the JSON objects of a stream.

    Args:
        kind: the prefix of event types, such as `image_edit`.
    """
    counts = [0] * fields.n
    try:
        async for number, event in events:
            if event.kind == "progress":
                if fields.progress:
                    yield {"type": f"{kind}.progress", "index": number, "done": event.done, "evaluations": event.evaluations}
                continue
            file = await asyncio.to_thread(lambda image=event.image: fields.file(as_uint8(image)))
            about = {"b64_json": file, "created_at": int(time.time()), "index": number} | fields.about(event.image)
            if event.kind == "preview":
                yield {"type": f"{kind}.partial_image", "partial_image_index": counts[number]} | about
                counts[number] += 1
            else:
                yield {"type": f"{kind}.completed"} | about
    finally:
        await events.aclose()


def _failure(error: ApiError) -> dict[str, Any]:
    return {"type": "error"} | error.body()
