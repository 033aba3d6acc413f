"""`ImageEngine`: a queue of images to draw, and a thread that draws images of equal size and sampling plan in batches.

When the device becomes free, a batch is formed from the waiting images. After each evaluation of the network, every image of the batch
gets a progress event, and a preview if one is due. An image is the same in any batch, because its noise depends on its own seed and
number.
"""

import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from argosy.core.errors import ArgosyError
from argosy.infer.denoise.control import for_each, with_span
from argosy.infer.denoise.pipeline import ImagePipeline
from argosy.infer.denoise.plan import SamplingPlan
from argosy.infer.denoise.sampling import Drawing
from argosy.infer.denoise.step_cache import check_step_cache
from argosy.models.diffusion.base import Conditions


class ImageEvent(NamedTuple):
    """An event of one image.

    kind: progress; preview: a prediction of the image so far; image: the finished image; error: drawing failed.
    done, evaluations: the evaluations of the network so far, and of the whole plan.
    image: the image or preview, [H W 3] in 0..1.
    error: the reason why drawing failed.
    """

    kind: Literal["progress", "preview", "image", "error"]
    done: int = 0
    evaluations: int = 0
    image: np.ndarray | None = None
    error: Exception | None = None


@dataclass(eq=False)
class ImageRequest:
    """One image to draw, made by `ImageEngine.request`.

    conditions: the conditions of its prompt, one row.
    null: the conditions of its negative prompt, one row; None: no classifier-free guidance.
    seed: the seed of its noise.
    number: index of the image among those of its prompt.
    guidance: the guidance scale.
    size: height and width in pixels.
    plan: the sampling plan.
    key: only images with equal keys are drawn in one batch.
    emit: called with each event, from the engine's thread.
    previews: number of previews to send.
    image: latents [1 h w C] of the image to begin from; None: noise alone.
    mask: [1 h w 1], 1 where `image` is redrawn; None: everywhere.
    step_cache: threshold of step caching; None: no step caching.
    canceled: set by the caller if it no longer wants the image.
    """

    conditions: Conditions
    null: Conditions | None
    seed: int
    number: int
    guidance: float
    size: tuple[int, int]
    plan: SamplingPlan
    key: tuple[Any, ...]
    emit: Callable[[ImageEvent], None]
    previews: int = 0
    image: Any = None
    mask: Any = None
    step_cache: float | None = None
    canceled: bool = field(default=False)

    def preview_at(self, done: int, evaluations: int) -> bool:
        """Whether a preview is due after `done` of `evaluations` evaluations. Previews are spread evenly, without one at the end."""
        now, before = (i * (self.previews + 1) // evaluations for i in (done, done - 1))
        return done < evaluations and before < now <= self.previews


class QueueOverflow(Exception):
    """Raised if too many images wait."""


class EngineClosed(ArgosyError):
    """The engine was closed before the image was drawn."""

    def __init__(self) -> None:
        super().__init__("the engine was closed before the image was drawn")


class ImageEngine:
    """Draws queued images with a pipeline, in a thread.

    Args:
        batch: the most images in a batch.
        waiting: the most waiting images.
        drawn: called after each batch with the number of its images, of its evaluations, and of those that step caching reused.
    """

    def __init__(
        self, pipeline: ImagePipeline, batch: int = 4, waiting: int = 256, drawn: Callable[[int, int, int], None] | None = None
    ):
        self.pipeline, self.batch, self.most, self._drawn = pipeline, batch, waiting, drawn
        self.waiting: deque[ImageRequest] = deque()
        self.running: list[ImageRequest] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="image engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def request(
        self,
        prompt: str,
        emit: Callable[[ImageEvent], None],
        *,
        negative: str | None = None,
        seed: int = 0,
        number: int = 0,
        steps: int | None = None,
        guidance: float | None = None,
        size: int | tuple[int, int] | None = None,
        previews: int = 0,
        image: Any = None,
        mask: Any = None,
        strength: float = 1.0,
        step_cache: float | None = None,
        control_image: Any = None,
        control_scale: float | Sequence[float] = 1.0,
        control_start: float | Sequence[float] = 0.0,
        control_end: float | Sequence[float] = 1.0,
        control_mode: int | Sequence[int | None] | None = None,
        guess_mode: bool = False,
    ) -> ImageRequest:
        """Prepares an image for `add`. Arguments are those of `ImagePipeline.images`, for one image.

        Args:
            emit: called with each event, from the engine's thread.
            number: index of the image among those of its prompt.
            previews: number of previews to send.
            image, mask: latents [1 h w C] and mask [1 h w 1], as `ImagePipeline.encode_given` returns them.

        Raises:
            BadInput: the size, the steps, the prompt or control images do not fit the model.
        """
        pipe, defaults = self.pipeline, self.pipeline.defaults
        if step_cache is not None:
            check_step_cache(pipe.denoiser, step_cache)
        area, count = pipe.checked_size(size), defaults.steps if steps is None else steps
        scale = defaults.guidance if guidance is None else guidance
        share = 1.0 if image is None else strength
        plan = pipe.plan(pipe.sampler, count, area, share)
        conditions, null = pipe.conditions([prompt], [negative], scale)
        key: tuple[Any, ...] = (area, count, share, null is None, image is None, mask is None, step_cache)
        control = pipe.control(control_image, 1, area, control_scale, guess_mode, control_mode)
        if control is not None:
            nets = len(pipe.controlnets)
            spans = [for_each(*span, nets) for span in (("control_start", control_start), ("control_end", control_end))]
            plan = with_span(plan, *spans)
            conditions, null = control.put_on(conditions, null, slice(None))
            # Images of a batch share a plan, and so the steps at which each ControlNet acts.
            key += tuple(map(tuple, spans))
        more: Any = {"previews": previews, "image": image, "mask": mask, "step_cache": step_cache}
        return ImageRequest(conditions, null, seed, number, scale, area, plan, key, emit, **more)

    def add(self, requests: list[ImageRequest]) -> None:
        """Queues images.

        Raises:
            QueueOverflow: there is no room for all of them. None is queued then.
        """
        with self._changed:
            if len(self.waiting) + len(requests) > self.most:
                raise QueueOverflow
            self.waiting.extend(requests)
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread after the current evaluation. Images that are not finished get an error event."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()
        ended = ImageEvent("error", error=EngineClosed())
        while self.waiting:
            self.waiting.popleft().emit(ended)

    @property
    def idle(self) -> bool:
        """Whether no image waits or is being drawn."""
        with self._changed:
            return not self.waiting and not self.running

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.waiting or self._closed)
                if self._closed:
                    return
                self.running = self._next_batch()
            try:
                if self.running:
                    self._draw(self.running)
            except Exception as error:
                if not isinstance(error, ArgosyError):
                    traceback.print_exc()
                for request in self.running:
                    request.emit(ImageEvent("error", error=error))
            finally:
                self.running = []

    def _next_batch(self) -> list[ImageRequest]:
        """Takes the first waiting image from the queue, and later ones that may be drawn in one batch with it. Drops canceled
        images."""
        requests = [request for request in self.waiting if not request.canceled]
        batch = [request for request in requests if request.key == requests[0].key][: self.batch]
        self.waiting = deque(request for request in requests if request not in batch)
        return batch

    def _draw(self, batch: list[ImageRequest]) -> None:
        pipe, first = self.pipeline, batch[0]
        image = None if first.image is None else np.concatenate([request.image for request in batch])
        mask = None if first.mask is None else np.concatenate([request.mask for request in batch])
        scales = np.array([request.guidance for request in batch], np.float32)
        height, width = (side // pipe.factor for side in first.size)
        conditions = _concatenate([request.conditions for request in batch])
        null = None if first.null is None else _concatenate([request.null for request in batch if request.null is not None])
        drawing = Drawing(
            first.plan,
            [(request.seed, request.number) for request in batch],
            scales,
            conditions,
            null,
            (height, width, pipe.config.channels),
            image,
            mask,
            cache_threshold=first.step_cache,
        )
        run = pipe.sampling(drawing)
        for i in range(run.evaluations):
            if self._closed or all(request.canceled for request in batch):
                break
            run.step(i)
            self._tell(batch, run, i + 1)
        if self._closed:
            raise EngineClosed
        if all(request.canceled for request in batch):
            return
        images = each_image(pipe.finished, run.latents()[: len(batch)])
        # Counted before the events are sent, so that a client with an image finds it in the metrics.
        if self._drawn is not None:
            count = sum(isinstance(image, np.ndarray) for image in images)
            self._drawn(count, run.evaluations, run.evaluations - run.layer_runs)
        for request, image in zip(batch, images, strict=True):
            if isinstance(image, np.ndarray):
                request.emit(ImageEvent("image", run.evaluations, run.evaluations, image))
            else:
                request.emit(ImageEvent("error", error=image))

    def _tell(self, batch: list[ImageRequest], run: Any, done: int) -> None:
        """Sends a progress event for every image, and previews that are due."""
        for request in batch:
            request.emit(ImageEvent("progress", done, run.evaluations))
        due = [i for i, request in enumerate(batch) if request.preview_at(done, run.evaluations) and not request.canceled]
        if due:
            images = each_image(self.pipeline.decode, run.predicted()[: len(batch)])
            for i in due:
                if isinstance(image := images[i], np.ndarray):
                    batch[i].emit(ImageEvent("preview", done, run.evaluations, image))


def each_image(decode: Callable[[Any], np.ndarray], latents: Any) -> list[np.ndarray | ArgosyError]:
    """Decodes each row of latents to an image, or to the error if decoding fails. Values of one image that are not finite do not affect
    others."""
    try:
        return list(decode(latents))
    except ArgosyError as error:
        if len(latents) == 1:
            return [error]
    return [image for row in range(len(latents)) for image in each_image(decode, latents[row : row + 1])]


def _concatenate(rows: list[Conditions]) -> Conditions:
    """Concatenates the conditions of several images to those of a batch."""
    # NumPy, because JAX would compile for each new number of rows.
    return Conditions(*jax.tree.map(lambda *a: np.concatenate(a), *(tuple(row) for row in rows)))
