"""`ImageEngine`: a queue of images to draw, and the thread that draws those of equal size and plan together.

A batch is formed from the images that wait when the device becomes free. After each evaluation every image of it learns how far it
is, gets a preview if it asked for one, and may leave. An image is the same in any batch: its noise is its own.
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
    """Something that happened to an image.

    kind: progress; preview: an image on its way; image: the image; error: it will not come.
    done, evaluations: of the network.
    image: [H W 3] in 0..1.
    error: why it will not come.
    """

    kind: Literal["progress", "preview", "image", "error"]
    done: int = 0
    evaluations: int = 0
    image: np.ndarray | None = None
    error: Exception | None = None


@dataclass(eq=False)
class ImageRequest:
    """One image to draw, made by `ImageEngine.request`.

    conditions, null: of its prompt, and of what guidance leads away from (None: no guidance); one row each.
    number: of the image among those of its prompt.
    previews: how many images on the way are wanted.
    emit: called with each event, from the engine's thread.
    step_cache: threshold of step caching (None: none).
    canceled: set by whoever does not want it any more.
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
        """Whether a preview is due after so many evaluations: they are spread evenly, none at the end."""
        now, before = (i * (self.previews + 1) // evaluations for i in (done, done - 1))
        return done < evaluations and before < now <= self.previews


class QueueOverflow(Exception):
    """Too many images wait."""


class EngineClosed(ArgosyError):
    """The engine was closed before the image was drawn."""

    def __init__(self) -> None:
        super().__init__("the engine was closed before the image was drawn")


class ImageEngine:
    """Draws images of a pipeline.

    Args:
        batch: most images drawn together.
        waiting: most images that wait.
        drawn: called with the number of a batch's images, of its evaluations, and of those that step caching reused.
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
        """An image to draw. Arguments are those of `ImagePipeline.images`, for one image.

        Args:
            image, mask: [1 h w C] latents and [1 h w 1], as `ImagePipeline.encode_given` gives them.

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
            QueueOverflow: there is no room for all of them; none is queued.
        """
        with self._changed:
            if len(self.waiting) + len(requests) > self.most:
                raise QueueOverflow
            self.waiting.extend(requests)
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread after the evaluation that runs. Images that were not drawn get an error."""
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
        """Whether nothing waits or is drawn."""
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
        """The first image that waits, and those behind it that may be drawn with it."""
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
        # Counted before anybody learns of them: whoever has an image finds it in the metrics.
        if self._drawn is not None:
            count = sum(isinstance(image, np.ndarray) for image in images)
            self._drawn(count, run.evaluations, run.evaluations - run.layer_runs)
        for request, image in zip(batch, images, strict=True):
            if isinstance(image, np.ndarray):
                request.emit(ImageEvent("image", run.evaluations, run.evaluations, image))
            else:
                request.emit(ImageEvent("error", error=image))

    def _tell(self, batch: list[ImageRequest], run: Any, done: int) -> None:
        """Progress of every image, and previews where they are due."""
        for request in batch:
            request.emit(ImageEvent("progress", done, run.evaluations))
        due = [i for i, request in enumerate(batch) if request.preview_at(done, run.evaluations) and not request.canceled]
        if due:
            images = each_image(self.pipeline.decode, run.predicted()[: len(batch)])
            for i in due:
                if isinstance(image := images[i], np.ndarray):
                    batch[i].emit(ImageEvent("preview", done, run.evaluations, image))


def each_image(decode: Callable[[Any], np.ndarray], latents: Any) -> list[np.ndarray | ArgosyError]:
    """The image of each row of latents, or why it has none: numbers of one request that are not finite end no other."""
    try:
        return list(decode(latents))
    except ArgosyError as error:
        if len(latents) == 1:
            return [error]
    return [image for row in range(len(latents)) for image in each_image(decode, latents[row : row + 1])]


def _concatenate(rows: list[Conditions]) -> Conditions:
    """The conditions of several images as those of a batch."""
    # By numpy, which compiles nothing for a number of rows that it has not met.
    return Conditions(*jax.tree.map(lambda *a: np.concatenate(a), *(tuple(row) for row in rows)))
