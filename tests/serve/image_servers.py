"""A server of images for tests: a tiny denoiser of classes, in a thread of this process."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

from laws.families import noisy_model

from argosy.infer.denoise.classes import ClassPrompts
from argosy.infer.denoise.pipeline import ImageDefaults, ImagePipeline
from argosy.infer.denoise.settings import SamplerSettings
from argosy.models.diffusion.dit import DiTConfig
from argosy.models.parts.stack import Unroll
from argosy.serve.images.run import serve_images
from argosy.serve.images.service import ImageService
from argosy.serve.images.settings import ImageLimits, ImageServeSettings
from argosy.web.process import bound_socket

CONFIG = DiTConfig(channels=3, size=8, patch=2, width=24, layers=2, heads=3, classes=4, waves=8)
Server = tuple[str, ImageService, threading.Event]
LIMITS = ImageLimits(images=4, steps=200, pixels=64 * 64, waiting=6)


def class_pipeline() -> ImagePipeline:
    """A tiny denoiser of four classes, with random weights."""
    prompts = ClassPrompts(CONFIG.classes, ["cat", "dog", "fox", "owl"])
    return ImagePipeline(noisy_model(CONFIG, Unroll()), prompts, SamplerSettings(), ImageDefaults(5, 2.0, (8, 8)))


@contextlib.contextmanager
def serving(pipe: ImagePipeline, **settings: object) -> Iterator[Server]:
    """Its server in a thread: address, service, and what stops it."""
    serve_settings = ImageServeSettings(port=0, limits=LIMITS, **settings)  # type: ignore[arg-type]
    service, stop, ready = ImageService(pipe, "classes", serve_settings), threading.Event(), threading.Event()
    listener: socket.socket = bound_socket(serve_settings.host, serve_settings.port)
    thread = threading.Thread(target=serve_images, args=(service, listener), kwargs={"stop": stop.is_set, "ready": ready.set})
    thread.start()
    try:
        assert ready.wait(30)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", service, stop
    finally:
        stop.set()
        thread.join(30)
        assert not thread.is_alive()


def wait_until_idle(service: ImageService) -> None:
    """Returns when nothing waits or is drawn: an image is sent before its batch has ended."""
    until = time.monotonic() + 30
    while not service.engine.idle:
        assert time.monotonic() < until
        time.sleep(0.02)
