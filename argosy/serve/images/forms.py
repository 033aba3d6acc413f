"""Reads the form of /v1/images/edits (multipart/form-data): an image, a mask, and fields as texts."""

import base64
import json
from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

import numpy as np
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException
from starlette.requests import Request

from argosy.core.errors import BadInput
from argosy.core.formats.image_files import read_image, resize_image
from argosy.serve.images.fields import EditFields
from argosy.serve.images.settings import ImageLimits
from argosy.web.body import read_body
from argosy.web.errors import ApiError, input_error

FILES = ("image", "image[]", "mask")
# Fields whose values are numbers, and those that are true or false. Other fields are texts.
NUMBERS = ("n", "num_inference_steps", "seed", "guidance_scale", "strength", "partial_images", "output_compression")
SWITCHES = ("stream", "progress", "guess_mode")
# Fields that are numbers, or lists with a number for each ControlNet; and the fields of control images.
SPANS = ("control_scale", "control_start", "control_end", "control_mode")
CONTROLS = ("control_image", "control_image[]")
MOST_FIELDS, MOST_FILES = 64, 8


class EditForm(NamedTuple):
    """A request to change an image.

    fields: the fields of the form.
    image: [H W 3] uint8.
    mask: [H W] 1 where the image is redrawn; None: everywhere.
    """

    fields: EditFields
    image: np.ndarray
    mask: np.ndarray | None


async def read_edit_form(request: Request, limits: ImageLimits) -> EditForm:
    """Reads the form of a request, within the limits.

    Raises:
        ApiError: the body is no form or too large, or a field or file is invalid.
    """
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "multipart/form-data":
        raise ApiError("send a form: `Content-Type: multipart/form-data`", status=415)
    try:
        from starlette.formparsers import MultiPartParser

        body = bytes(await read_body(request, limits))
        parser = MultiPartParser(request.headers, _stream(body), max_files=MOST_FILES, max_fields=MOST_FIELDS)
        form = await parser.parse()
    except (MultiPartException, KeyError) as error:
        raise ApiError(f"the form cannot be read: {getattr(error, 'message', 'it has no boundary')}") from None
    except AssertionError:
        raise ApiError("this server reads no forms: it lacks the package `python-multipart`", status=501) from None
    try:
        files, values = await _sorted(form)
    finally:
        await form.close()
    if "image" not in files:
        raise ApiError("`image` is missing", param="image", code="missing_required_parameter")
    fields = EditFields.of(values)
    image = _image(files["image"], "image", limits)
    return EditForm(fields, image[..., :3], _mask(image, files.get("mask"), limits))


async def _sorted(form: FormData) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Splits a form into files and other fields, by name.

    Raises:
        ApiError: a field is given twice, or a file has an unknown name.
    """
    files: dict[str, bytes] = {}
    values: dict[str, Any] = {}
    controls: list[str] = []
    for name, value in form.multi_items():
        if name in CONTROLS:
            controls.append(base64.b64encode(await value.read()).decode() if isinstance(value, UploadFile) else value)
            continue
        to = "image" if name == "image[]" else name
        if to in files or to in values:
            raise ApiError(f"`{to[:64]}` is given twice: one image is read", param=to[:64])
        if isinstance(value, UploadFile):
            if name not in FILES:
                raise ApiError(f"`{name[:64]}` is no file of this request", param=name[:64], code="unknown_parameter")
            files[to] = await value.read()
        elif to in FILES:
            raise ApiError(f"`{to}` is no file", param=to)
        else:
            values[to] = _parsed(to, value)
    return files, values | ({"control_image": controls} if controls else {})


def _parsed(name: str, text: str) -> Any:
    if name not in (*NUMBERS, *SWITCHES, *SPANS):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _image(data: bytes, name: str, limits: ImageLimits) -> np.ndarray:
    try:
        return read_image(data, 4 * limits.pixels)
    except BadInput as error:
        raise ApiError(f"`{name}`: {input_error(error).message}", param=name) from None


def _mask(image: np.ndarray, data: bytes | None, limits: ImageLimits) -> np.ndarray | None:
    """The mask of a form. The image is redrawn where the mask file is transparent, or, without a mask file, where the image is
    transparent.

    Args:
        image: [H W 3], or [H W 4] with transparency.
        data: the mask file.
    """
    if data is None:
        return None if image.shape[2] == 3 or image[..., 3].all() else (image[..., 3] < 128).astype(np.float32)
    mask = _image(data, "mask", limits)
    if mask.shape[:2] != image.shape[:2]:
        sizes = [f"{picture.shape[1]}x{picture.shape[0]}" for picture in (mask, image)]
        raise ApiError(f"`mask` has {sizes[0]} pixels, and the image {sizes[1]}", param="mask")
    if mask.shape[2] == 3:
        raise ApiError("`mask` has no transparency: transparent pixels are drawn anew", param="mask")
    return (mask[..., 3] < 128).astype(np.float32)


def fit_form(form: EditForm, height: int, width: int) -> EditForm:
    """Resizes the image and the mask of a form."""
    mask = form.mask
    if mask is not None:
        mask = (resize_image((mask * 255).astype(np.uint8), height, width) > 127).astype(np.float32)
    return form._replace(image=resize_image(form.image, height, width), mask=mask)


async def _stream(body: bytes) -> AsyncGenerator[bytes]:
    yield body
