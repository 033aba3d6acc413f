"""OpenAI's /v1/images/generations, for bundles whose default signature draws images of prompts (`export.images`)."""

import asyncio
import secrets
import time
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.core.formats.image_files import image_size
from argosy.export.control_inputs import FILE, IMAGE, MODE, SCALE, suffixes_in
from argosy.export.manifest import BundleSignature
from argosy.export.steps import TokenizePromptStep, file_bytes
from argosy.predict.repository import LoadedVersion
from argosy.predict.service import PredictService
from argosy.web.body import read_json_body
from argosy.web.errors import ApiError, Json, input_error, unknown_model
from argosy.web.images import ImageGenerationFields

IMAGES, FINITE = "images", "finite"
# As in OpenAI's API.
MOST_IMAGES = 10
# As `argosy serve` has them, unless it is told otherwise: characters of a prompt, and pixels of a control image.
MOST_CHARACTERS, MOST_CONTROL_PIXELS = 32_768, 8_388_608


class BundleImageFields(ImageGenerationFields):
    """A request for images that a bundle draws.

    control_image: for a bundle with a ControlNet, the image that it follows: a file in base64, or as a `data:` URL. It is resized to
        the size of the images. For several ControlNets it is a list, in their order.
    control_scale: how strongly it acts; one for all ControlNets, or one for each.
    control_mode: for ControlNets that know several kinds of control, the number of the kind.
    """

    control_image: str | list[str] | None = None
    control_scale: float | list[float] = 1.0
    control_mode: int | list[int | None] | None = None


class BundleImageRoutes:
    """/v1/images/generations."""

    def __init__(self, service: PredictService):
        self.service = service

    def routes(self) -> list[Route]:
        return [Route("/v1/images/generations", self.generations, methods=["POST"])]

    async def generations(self, request: Request) -> Response:
        fields = BundleImageFields.of(await read_json_body(request, self.service.settings.limits))
        fields.check_format()
        name = self._name(fields)
        version = self.service.find(name)
        inputs = await asyncio.to_thread(image_inputs, version.bundle.manifest.signature(), fields, name)
        _, result = await self.service.call(request, lambda: self.service.find(name), inputs, None)
        if not np.asarray(result.outputs[FINITE]).all():
            raise ApiError("numbers that are not finite were drawn", status=500)
        images = np.asarray(result.outputs[IMAGES])
        files = await asyncio.to_thread(lambda: [fields.file(image) for image in images])
        return Json({"created": int(time.time()), "data": [{"b64_json": file} for file in files]} | fields.about(images[0]))

    def _name(self, fields: BundleImageFields) -> str:
        """The model of a request; the only one that draws, where it names none."""
        models = self.service.repository.models
        if fields.model is not None:
            if fields.model not in models:
                raise unknown_model(fields.model)
            return fields.model
        draws = [name for name, state in models.items() if any(draws_prompts(version) for version in state.versions.values())]
        if len(draws) != 1:
            raise ApiError(f"`model` is missing: {plural(len(draws), 'model')} of this server draw images of prompts", param="model")
        return draws[0]


def draws_prompts(version: LoadedVersion) -> bool:
    """Whether the default signature of a version draws images of prompts."""
    signature = version.bundle.manifest.signature()
    is_prompted = any(isinstance(step, TokenizePromptStep) for step in signature.preprocess)
    return is_prompted and {IMAGES, FINITE} <= {spec.name for spec in signature.outputs}


def image_inputs(signature: BundleSignature, fields: BundleImageFields, name: str) -> dict[str, Any]:
    """The inputs of a signature for a request.

    Raises:
        ApiError: the signature draws no prompts, another size, or takes no guidance, negative prompt or control image; or too many
            images are wanted, a prompt is too long, or control images are missing or too large.
    """
    outputs = {spec.name: spec for spec in signature.outputs}
    prompts = [step.input for step in signature.preprocess if isinstance(step, TokenizePromptStep)]
    if not prompts or not {IMAGES, FINITE} <= set(outputs):
        raise ApiError(f"model `{name}` draws no images of prompts", param="model", code="wrong_kind_of_model")
    height, width = outputs[IMAGES].shape[1:3]
    if fields.area() not in (None, (height, width)):
        raise ApiError(f"`size`: this model was exported for {width}x{height}", param="size")
    if fields.n > MOST_IMAGES:
        raise ApiError(f"`n`: {fields.n} images, this server allows {MOST_IMAGES}", param="n")
    for field in ("prompt", "negative_prompt"):
        if len(getattr(fields, field) or "") > MOST_CHARACTERS:
            problem = f"`{field}`: {len(getattr(fields, field))} characters, this server allows {MOST_CHARACTERS}"
            raise ApiError(problem, param=field)
    seed = secrets.randbits(32) if fields.seed is None else fields.seed
    inputs: dict[str, Any] = {prompts[0]: [fields.prompt] * fields.n, "seed": [seed] * fields.n, "index": list(range(fields.n))}
    if fields.negative_prompt is not None:
        if len(prompts) < 2:
            raise ApiError("`negative_prompt` has no effect on this model", param="negative_prompt", code="unsupported_parameter")
        inputs[prompts[1]] = [fields.negative_prompt] * fields.n
    if fields.guidance_scale is not None:
        if "guidance" not in {spec.name for spec in signature.inputs}:
            raise ApiError("`guidance_scale` has no effect on this model", param="guidance_scale", code="unsupported_parameter")
        inputs["guidance"] = [fields.guidance_scale] * fields.n
    return inputs | {key: [value] * fields.n for key, value in control_values(signature, fields, name).items()}


def control_values(signature: BundleSignature, fields: BundleImageFields, name: str) -> dict[str, Any]:
    """What the ControlNets of a signature are given for each image of a request, by the names of its inputs.

    Raises:
        ApiError: the signature has no ControlNet, or another number of them, kinds of control do not fit, or a control image is too
            large.
    """
    ends, specs = suffixes_in(signature), {spec.name: spec for spec in signature.inputs}
    given = [field for field in (IMAGE, SCALE, MODE) if field in fields.model_fields_set]
    if given and not ends:
        raise ApiError(f"`{given[0]}`: model `{name}` has no ControlNet", param=given[0], code="unsupported_parameter")
    files = [fields.control_image] if isinstance(fields.control_image, str) else fields.control_image or []
    if len(files) != len(ends):
        needed = "the image that its ControlNet follows" if len(ends) == 1 else f"{len(ends)} images, one for each ControlNet"
        raise ApiError(f"`control_image`: model `{name}` needs {needed}", param=IMAGE)
    for file in files:
        _check_pixels(file)
    values: dict[str, Any] = {}
    for i, end in enumerate(ends):
        values |= {f"{FILE}{end}": files[i], f"{SCALE}{end}": _of_each(SCALE, fields.control_scale, i, len(ends))}
        mode, spec = _of_each(MODE, fields.control_mode, i, len(ends)), specs.get(f"{MODE}{end}")
        if (mode is None) != (spec is None):
            state = "has no effect on a ControlNet of one kind" if spec is None else f"is missing: a number from 0 to {spec.maximum}"
            raise ApiError(f"`control_mode` {state}", param=MODE)
        values |= {} if spec is None else {spec.name: mode}
    return values


def _check_pixels(file: str) -> None:
    """Checks the size of a control image by the head of its file, before anything is decoded."""
    try:
        height, width = image_size(file_bytes(file))
    except BadInput as error:
        raise ApiError(f"`{IMAGE}`: {input_error(error).message}", param=IMAGE) from None
    if height * width > MOST_CONTROL_PIXELS:
        problem = f"`{IMAGE}`: an image of {width}x{height} pixels, this server allows {MOST_CONTROL_PIXELS} pixels"
        raise ApiError(problem, param=IMAGE)


def _of_each(field: str, value: Any, i: int, count: int) -> Any:
    """The value of ControlNet i of `count`, of a list or of one for all."""
    if not isinstance(value, list):
        return value
    if len(value) != count:
        raise ApiError(f"`{field}`: {len(value)} of them for {plural(count, 'ControlNet')}", param=field)
    return value[i]
