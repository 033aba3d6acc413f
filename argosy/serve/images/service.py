"""The service behind the image routes: the engine, the limits and the metrics."""

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from random import SystemRandom
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from argosy.core.errors import ArgosyError, BadInput
from argosy.core.formats.image_files import resize_image
from argosy.infer.denoise.engine import EngineClosed, ImageEngine, ImageEvent, ImageRequest, QueueOverflow
from argosy.infer.denoise.pipeline import ImagePipeline
from argosy.infer.denoise.step_cache import check_step_cache
from argosy.serve.images.fields import EditFields, ImageFields
from argosy.serve.images.forms import EditForm, fit_form
from argosy.serve.images.settings import ImageServeSettings
from argosy.web.errors import ApiError, input_error, service_unavailable

# The fields of requests for ControlNets.
CONTROL = ("control_image", "control_scale", "control_start", "control_end", "control_mode", "guess_mode")
SECONDS = tuple(0.05 * (1 << i) for i in range(15))


class ImageMetrics:
    """The Prometheus metrics of a server of images."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        options: Any = {"registry": self.registry}
        self.requests = Counter("argosy_image_requests", "Requests, by how they ended.", ["outcome"], **options)
        self.images = Counter("argosy_images", "Images that were drawn.", **options)
        self.evaluations = Counter("argosy_image_evaluations", "Evaluations of the network, a batch's counted once.", **options)
        about = "Evaluations of which step caching ran the first layer alone."
        self.reused = Counter("argosy_image_reused_evaluations", about, **options)
        self.batch = Histogram("argosy_image_batch", "Images of a batch.", buckets=(1, 2, 4, 8, 16, 32), **options)
        self.seconds = Histogram("argosy_image_request_seconds", "Seconds from arrival to the last image.", buckets=SECONDS, **options)
        self.waiting = Gauge("argosy_images_waiting", "Images that wait.", **options)

    def drawn(self, images: int, evaluations: int, reused: int) -> None:
        """Counts a batch that was drawn.

        Args:
            images: number of its images.
            evaluations: number of evaluations of the network.
            reused: number of evaluations in which step caching ran only the first layer.
        """
        self.reused.inc(reused)
        self.images.inc(images)
        self.evaluations.inc(evaluations)
        self.batch.observe(images)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class ImageService:
    """A served image pipeline.

    Args:
        name: the name of the model in the API.

    created: when the service was made, in seconds since 1970.
    draining: whether new requests are refused because the server is about to end.
    """

    def __init__(self, pipeline: ImagePipeline, name: str, settings: ImageServeSettings):
        self.pipeline, self.name, self.settings = pipeline, name, settings
        if settings.step_cache is not None:
            check_step_cache(pipeline.denoiser, settings.step_cache)
        self.metrics = ImageMetrics()
        self.engine = ImageEngine(pipeline, settings.batch, settings.limits.waiting, self.metrics.drawn)
        self.created, self.draining = int(time.time()), False
        self._seeds = SystemRandom()
        self.about = (f"draws {pipeline.defaults.size[1]}x{pipeline.defaults.size[0]} pixels in {pipeline.defaults.steps} steps",)

    def warm_up(self) -> None:
        """Compiles the programs of the default size, for every batch size."""
        size = 1
        while True:
            # `warm_up` draws without prompts, because a model may accept only some texts, such as names of classes.
            self.pipeline.warm_up(min(size, self.settings.batch), self.settings.step_cache)
            if size >= self.settings.batch:
                return
            size *= 2

    def fitted(self, form: EditForm) -> EditForm:
        """Resizes the image of a form to the size that will be drawn: the requested size, or the one nearest to the image's size.

        Raises:
            ApiError: the model cannot draw that size, or it is beyond the limits.
        """
        area, multiple = form.fields.area(), self.pipeline.factor * self.pipeline.config.size_multiple
        if area is None:
            height, width = (max(multiple, round(side / multiple) * multiple) for side in form.image.shape[:2])
            if height * width > self.settings.limits.pixels:
                raise ApiError(f"`image`: this server draws {self.settings.limits.pixels} pixels at most", param="image")
        else:
            form.fields.check(self.settings.limits)
            try:
                height, width = self.pipeline.checked_size(area)
            except BadInput as error:
                raise input_error(error, "size") from None
        return fit_form(form, height, width)

    async def events(
        self, fields: ImageFields, image: Any = None, mask: Any = None
    ) -> AsyncGenerator[tuple[int, ImageEvent]]:
        """Draws the images of a request. Yields their events, each with the image's index, until all images are there. If the generator
        is closed earlier, the missing images are canceled.

        Raises:
            ApiError: the request does not fit the model or the limits, too many images wait, or an image failed.
        """
        if self.draining:
            raise service_unavailable("the server is shutting down", "shutting_down")
        fields.check(self.settings.limits)
        if fields.model is not None and fields.model != self.name:
            raise ApiError(f"the model `{fields.model[:128]}` does not exist, this server has `{self.name}`", status=404, param="model")
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[tuple[int, ImageEvent]]()
        begin, requests, outcome = time.perf_counter(), [], "canceled"
        try:
            requests = await asyncio.to_thread(self._requests, fields, image, mask, loop, queue)
            self.engine.add(requests)
            images_left = len(requests)
            while images_left:
                number, event = await queue.get()
                if event.kind == "error":
                    raise _failure(event.error)
                images_left -= event.kind == "image"
                yield number, event
            outcome = "drawn"
            self.metrics.seconds.observe(time.perf_counter() - begin)
        except QueueOverflow:
            outcome = "refused"
            raise service_unavailable("too many images wait", "queue_full") from None
        except ApiError as error:
            outcome = "failed" if error.status >= 500 else "refused"
            raise
        finally:
            for request in requests:
                request.canceled = True
            self.metrics.requests.labels(outcome).inc()

    def _requests(self, fields: ImageFields, image: Any, mask: Any, loop: Any, queue: Any) -> list[ImageRequest]:
        seed = self._seeds.randrange(2**32) if fields.seed is None else fields.seed
        options: dict[str, Any] = {"negative": fields.negative_prompt, "seed": seed, "steps": fields.num_inference_steps}
        options |= {"guidance": fields.guidance_scale, "size": fields.area(), "previews": fields.partial_images}
        options["step_cache"] = self.settings.step_cache if fields.step_cache is None else fields.step_cache
        try:
            if image is not None:
                options["size"] = image.shape[:2]
                options["image"], options["mask"] = self.pipeline.encode_given(image, mask, 1, options["size"])
            if isinstance(fields, EditFields):
                options["strength"] = fields.strength
            options |= self._control(fields, options["size"])
            # The prompt is encoded once for all of its images.
            first = self.engine.request(fields.prompt, _emitter(0, loop, queue), **options)
            return [replace(first, number=i, emit=_emitter(i, loop, queue)) for i in range(fields.n)]
        except BadInput as error:
            raise input_error(error) from None

    def _control(self, fields: ImageFields, size: tuple[int, int] | None) -> dict[str, Any]:
        """The arguments of `ImageEngine.request` for ControlNets.

        Raises:
            ApiError: the model has no ControlNet, or a control image cannot be read.
            BadInput: the size does not fit the model.
        """
        names = [name for name in CONTROL if name in fields.model_fields_set]
        nets = len(self.pipeline.controlnets)
        if names and not nets:
            raise ApiError(f"`{names[0]}`: this server's model has no ControlNet", param=names[0])
        if not nets:
            return {}
        height, width = self.pipeline.checked_size(size)
        if len(fields.control_files) != nets:
            needed = "the image that its ControlNet follows" if nets == 1 else f"{nets} images, one for each ControlNet"
            raise ApiError(f"`control_image`: this server's model needs {needed}", param="control_image")
        images = [resize_image(image, height, width)[None] for image in fields.controls(self.settings.limits)]
        options: dict[str, Any] = {name: getattr(fields, name) for name in CONTROL if name != "control_image"}
        return options | {"control_image": images if nets > 1 else images[0]}

    async def drain(self) -> None:
        """Refuses new requests. Returns when running ones have ended, or after `drain` seconds."""
        self.draining = True
        deadline = time.monotonic() + self.settings.drain
        while not self.engine.idle and time.monotonic() < deadline:
            await asyncio.sleep(0.05)


def _emitter(number: int, loop: Any, queue: Any) -> Any:
    """Returns a function that puts the events of image `number` into a queue of the event loop, from any thread."""

    def emit(event: ImageEvent) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(queue.put_nowait, (number, event))

    return emit


def _failure(error: Exception | None) -> ApiError:
    if isinstance(error, EngineClosed):
        return service_unavailable("the server is shutting down", "shutting_down")
    if isinstance(error, ArgosyError):
        return ApiError(error.what, status=500)
    return ApiError("internal error", status=500)
