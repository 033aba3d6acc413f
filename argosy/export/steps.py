"""Steps of a bundle outside its programs: text to ids, image files to arrays, vectors to length 1, scores to probabilities and classes,
ids to text.

They are named in the manifest with everything that they need, and run by numpy, Pillow and the tokenizer in the bundle.
"""

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from argosy.core.counts import plural
from argosy.core.errors import BadInput, nearest
from argosy.core.formats.image_files import read_image, resize_image
from argosy.core.sequences import common_length
from argosy.core.settings import Settings
from argosy.data.framing import TextFrame, frame_ids, unescape_text
from argosy.data.tokenizers import Tokenizer
from argosy.data.tokenizers.learned import LearnedTokens


class TokenizeStep(Settings):
    """Converts texts to rows of ids of the same length, and a mask of the tokens."""

    step: Literal["tokenize"] = "tokenize"
    input: str = "text"
    """The input to tokenize, a list of texts."""
    folder: str = "tokenizer"
    """The folder of the tokenizer's files."""
    first: list[int] = Field(default_factory=list)
    """Ids before each text."""
    last: list[int] = Field(default_factory=list)
    """Ids after each text."""
    prompt: str = ""
    """Text before each text."""
    prompts: dict[str, str] = Field(default_factory=dict)
    """Texts that may stand there in place of `prompt`, by name: `query: ` before queries."""
    prompt_name: str = "prompt_name"
    """The input that names the prompt of each text, where there are `prompts`; an empty name is `prompt`. It is optional."""
    prompt_length: str = ""
    """The program's input that receives the number of tokens up to the end of the prompt, which are not pooled. Empty: all are."""
    strip: bool = False
    """Whether blanks around a text and its prompt are removed."""
    lower: bool = False
    """Whether texts are converted to lower case."""
    cut: bool = False
    """Whether the end of a text that is too long is cut. Otherwise such a text is an error."""
    tokens: str = "tokens"
    """The program's input that receives the ids."""
    mask: str = "mask"
    """The program's input that receives 1 for each token and 0 for padding."""

    @property
    def texts(self) -> list[str]:
        """Names of its inputs, the optional ones last."""
        return [self.input, *([self.prompt_name] if self.prompts else [])]

    @property
    def results(self) -> list[str]:
        """Names of the program's inputs that it produces."""
        return [self.tokens, self.mask, *([self.prompt_length] if self.prompt_length else [])]

    @property
    def folders(self) -> list[str]:
        """The folders of its tokenizers."""
        return [self.folder]


class TokenizePairsStep(TokenizeStep):
    """Converts texts, or pairs of texts, to rows of ids. In a pair that is too long, the end of the longer text is cut."""

    step: Literal["tokenize_pairs"] = "tokenize_pairs"  # type: ignore[assignment]
    pair: str = "text_pair"
    """The input with the second text of each pair. It is optional."""
    between: list[int] = Field(default_factory=list)
    """Ids between the two texts of a pair."""
    types: str = ""
    """The program's input that receives 1 for each token of the second text. Empty: the program does not distinguish the texts."""

    @property
    def texts(self) -> list[str]:
        return [self.input, self.pair]

    @property
    def results(self) -> list[str]:
        return [*super().results, *([self.types] if self.types else [])]


class EncoderTokens(Settings):
    """How one text encoder reads prompts: rows of a fixed length, whose padding it may read like words."""

    folder: str
    """The folder of the tokenizer's files."""
    length: int = Field(gt=0)
    """Ids of a row."""
    prefix_ids: list[int] = Field(default_factory=list)
    """Ids before each text."""
    suffix_ids: list[int] = Field(default_factory=list)
    """Ids after each text."""
    prefix: str = ""
    """Text before each text: the beginning of a conversation."""
    suffix: str = ""
    """Text after each text."""
    pad: int = Field(ge=0)
    """The id of padding."""
    pad_left: bool = False
    """Whether padding stands before the text; else after it."""
    tokens: str
    """The program's input that receives the ids."""
    mask: str
    """The program's input that receives 1 for each token of the text and 0 for padding."""
    learned: dict[str, list[int]] = Field(default_factory=dict)
    """The ids of learned tokens, by their names in a text."""

    @model_serializer(mode="wrap")
    def _without_learned(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """An encoder without learned tokens has the same text as when there were none."""
        return {name: value for name, value in handler(self).items() if name != "learned" or value}


class TokenizePromptStep(Settings):
    """Converts prompts to ids, for every text encoder of a model that draws. In a prompt the name of a special token is that token. An
    encoder with shorter rows loses the end of a prompt; a prompt that no encoder reads to its end is an error.
    """

    step: Literal["tokenize_prompt"] = "tokenize_prompt"
    input: str = "prompt"
    """The input to tokenize, a list of texts."""
    encoders: list[EncoderTokens] = Field(min_length=1)
    """The text encoders."""
    unescape: bool = False
    """Whether names of characters (`&amp;`) become the characters, and white space one blank."""

    @property
    def texts(self) -> list[str]:
        """Names of its inputs."""
        return [self.input]

    @property
    def results(self) -> list[str]:
        """Names of the program's inputs that it produces."""
        return [name for encoder in self.encoders for name in (encoder.tokens, encoder.mask)]

    @property
    def folders(self) -> list[str]:
        """The folders of its tokenizers."""
        return [encoder.folder for encoder in self.encoders]


class DecodeImageStep(Settings):
    """Converts image files (PNG, JPEG, WebP ...) to an array of images. The names of numbers are those of preprocessor_config.json in
    transformers."""

    step: Literal["decode_image"] = "decode_image"
    input: str = "image_file"
    """The input with the files: bytes, or texts in base64, which may be data URLs."""
    image: str = "image"
    """The program's input that receives the images."""
    height: int = Field(gt=0)
    """Height of the images in pixels."""
    width: int = Field(gt=0)
    """Width of the images in pixels."""
    layout: Literal["HWC", "CHW", "HW"] = "HWC"
    """The order of an image's axes; HW: without an axis of channels, for gray images."""
    channels: Literal[1, 3] = 3
    """1: gray; 3: red, green and blue."""
    resize: Literal["cover", "stretch", "contain"] = "cover"
    """cover: the image covers the size, and the middle is cropped; stretch: both sides become those of the size; contain: the whole
    image is inside, between bars of `background`."""
    background: int = Field(255, ge=0, le=255)
    """The gray behind transparent pixels and beside an image that is contained: 0 is black, 255 white."""
    transparency: Literal["blend", "ignore"] = "blend"
    """blend: transparent pixels are blended with `background`; ignore: they have their colors, as if they were opaque."""
    rescale_factor: float = 1 / 255
    """What pixels, from 0 to 255, are multiplied with."""
    image_mean: list[float] = Field(default_factory=list)
    """What is subtracted of each channel afterwards; empty: nothing."""
    image_std: list[Annotated[float, Field(gt=0)]] = Field(default_factory=list)
    """What each channel is divided by afterwards; empty: by nothing."""

    @model_serializer(mode="wrap")
    def _without_transparency(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A step that blends has the same text as when every step did."""
        return {name: value for name, value in handler(self).items() if name != "transparency" or value != "blend"}

    @model_validator(mode="after")
    def _channels_agree(self) -> "DecodeImageStep":
        for name in ("image_mean", "image_std"):
            if getattr(self, name) and len(getattr(self, name)) != self.channels:
                raise ValueError(f"{name} has {plural(len(getattr(self, name)), 'number')} for {plural(self.channels, 'channel')}")
        if self.layout == "HW" and self.channels != 1:
            raise ValueError("layout=HW is for gray images: channels=1")
        return self

    @property
    def texts(self) -> list[str]:
        """Names of its inputs."""
        return [self.input]

    @property
    def results(self) -> list[str]:
        """Names of the program's inputs that it produces."""
        return [self.image]

    @property
    def folders(self) -> list[str]:
        """The folders of its tokenizers: none."""
        return []

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one image."""
        sizes = {"H": self.height, "W": self.width, "C": self.channels}
        return tuple(sizes[axis] for axis in self.layout)


# Steps before a program.
InputStep = TokenizeStep | TokenizePairsStep | TokenizePromptStep | DecodeImageStep


class NormalizeStep(Settings):
    """Scales vectors to length 1."""

    step: Literal["normalize"] = "normalize"
    output: str = "embedding"
    """The output that is scaled."""


class ProbabilitiesStep(Settings):
    """Converts scores to probabilities."""

    step: Literal["softmax", "sigmoid"]
    """softmax: each text has exactly one class; sigmoid: classes are independent."""
    scores: str = "scores"
    """The output with the scores."""
    output: str = "probabilities"
    """The name of the output with the probabilities."""
    names: list[str] = Field(default_factory=list)
    """The names of the classes; empty: they have none."""


class LabelsStep(Settings):
    """Finds the name of the class with the largest score."""

    step: Literal["labels"] = "labels"
    scores: str = "scores"
    """The output with the scores."""
    names: list[str]
    """The names of the classes."""
    output: str = "label"
    """The name of the output with the class names."""


class DetokenizeStep(Settings):
    """Converts rows of ids to texts."""

    step: Literal["detokenize"] = "detokenize"
    folder: str = "tokenizer"
    """The folder of the tokenizer's files."""
    tokens: str = "tokens"
    """The output with the ids."""
    lengths: str = "lengths"
    """The output with the number of ids of each row."""
    output: str = "text"
    """The name of the output with the texts."""


def tokenize_inputs(
    step: TokenizeStep, tokenizer: Tokenizer, texts: Any, longest: int | None, more: Any = None
) -> dict[str, np.ndarray]:
    """The inputs of the program for these texts.

    Args:
        longest: limit of a row in ids; None: no limit.
        more: the second text of each pair, or the name of each text's prompt; None: none has one.

    Raises:
        BadInput: a value is no text, a text has no token or is too long, or a prompt is unknown.
    """
    texts = _texts(step.input, texts)
    is_pairs = isinstance(step, TokenizePairsStep)
    prompts = [step.prompt] * len(texts) if is_pairs or more is None else _prompts(step, more, len(texts))
    ids = _ids(step, tokenizer, texts, prompts)
    if isinstance(step, TokenizePairsStep):
        others = None if more is None else _ids(step, tokenizer, _texts(step.pair, more, len(texts)), prompts)
        frame = TextFrame(tuple(step.first), tuple(step.between), tuple(step.last))
        most = longest if step.cut else None
        both = [frame_ids(frame, row, None if others is None else others[i], most) for i, row in enumerate(ids)]
        rows, seconds = [row for row, _ in both], [second for _, second in both]
    else:
        spare = len(step.first) + len(step.last)
        if step.cut and longest is not None:
            ids = [row[: max(longest - spare, 0)] for row in ids]
        rows, seconds = [[*step.first, *row, *step.last] for row in ids], None
    for text, row in zip(texts, rows, strict=True):
        if not row:
            raise BadInput(f"`{step.input}`: {text[:40]!r} has no tokens")
        if longest is not None and len(row) > longest:
            raise BadInput(f"`{step.input}`: {text[:40]!r} has {len(row)} tokens, and this signature takes {longest}")
    arrays = padded_rows(step, rows)
    if step.prompt_length:
        before = _before(step, tokenizer, prompts)
        # A token may belong to the end of a prompt and the beginning of its text: it is pooled.
        sizes = [common_length(before[prompt], row) if prompt else 0 for prompt, row in zip(prompts, ids, strict=True)]
        arrays[step.prompt_length] = np.array([len(step.first) + n if n else 0 for n in sizes], np.int32)
    if isinstance(step, TokenizePairsStep) and step.types:
        kinds = np.zeros_like(arrays[step.tokens])
        for i, (row, second) in enumerate(zip(rows, seconds or (), strict=True)):
            kinds[i, second or len(row) : len(row)] = 1
        arrays[step.types] = kinds
    return arrays


def tokenized_prompts(step: TokenizePromptStep, tokenizer: Callable[[str], Tokenizer], texts: Any) -> dict[str, np.ndarray]:
    """The inputs of the program for these prompts.

    Args:
        tokenizer: returns the tokenizer in a folder of the bundle.

    Raises:
        BadInput: a value is no text, or no encoder reads it to its end.
    """
    texts = _texts(step.input, texts)
    plain = [unescape_text(text) for text in texts] if step.unescape else texts
    arrays, cut = {}, [True] * len(texts)
    for encoder in step.encoders:
        room = encoder.length - len(encoder.prefix_ids) - len(encoder.suffix_ids)
        tokens = np.full((len(texts), encoder.length), encoder.pad, np.int32)
        mask = np.zeros_like(tokens)
        whole = [encoder.prefix + text + encoder.suffix for text in plain]
        for i, ids in enumerate(LearnedTokens(encoder.learned).encode(tokenizer(encoder.folder), whole)):
            row = [*encoder.prefix_ids, *ids[:room], *encoder.suffix_ids]
            place = slice(encoder.length - len(row), None) if encoder.pad_left else slice(len(row))
            tokens[i, place], mask[i, place] = row, 1
            cut[i] = cut[i] and len(ids) > room
        arrays |= {encoder.tokens: tokens, encoder.mask: mask}
    if any(cut):
        longest = max(encoder.length - len(encoder.prefix_ids) - len(encoder.suffix_ids) for encoder in step.encoders)
        text = texts[cut.index(True)]
        raise BadInput(f"`{step.input}`: {text[:40]!r} has more tokens than the {longest} that this model reads", hint="a shorter one")
    return arrays


def decoded_images(step: DecodeImageStep, files: Any, dtype: np.dtype) -> np.ndarray:
    """The images of these files, [files, *step.shape].

    Args:
        files: bytes, or texts in base64.
        dtype: the type of the program's input. Whole numbers are rounded, and stay in its range.

    Raises:
        BadInput: a value is no file, or a file no image that can be read.
    """
    files = files.tolist() if isinstance(files, np.ndarray) else [files] if isinstance(files, str | bytes) else files
    if not isinstance(files, list | tuple) or not files:
        raise BadInput(f"`{step.input}` takes a list of image files", hint=f'"{step.input}": ["iVBORw0KGgo..."], each in base64')
    images, first = np.zeros((len(files), *step.shape), dtype), dict[bytes, int]()
    for i, file in enumerate(files):
        try:
            data = file_bytes(file)
            # Equal files are decoded once: several images of a request may follow the same one.
            at = first.setdefault(data, i)
            images[i] = images[at] if at < i else _image_array(step, read_image(data), dtype)
        except BadInput as error:
            raise BadInput(f"`{step.input}`, file {i}: {error.what}", hint=error.hint) from None
    return images


def _image_array(step: DecodeImageStep, image: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """An image as the program reads it, of the step's shape."""
    pixels = _fitted(step, image)
    if step.channels == 1:
        # The gray of ITU-R BT.601, as in Pillow's mode L.
        pixels = np.rint(pixels @ np.array([0.299, 0.587, 0.114]))[..., None]
    pixels = pixels * step.rescale_factor - np.array(step.image_mean or 0.0)
    pixels = pixels / np.array(step.image_std or 1.0)
    if dtype.kind in "iu":
        pixels = np.clip(np.rint(pixels), np.iinfo(dtype).min, np.iinfo(dtype).max)
    axes = pixels.transpose(2, 0, 1) if step.layout == "CHW" else pixels
    return axes.reshape(step.shape).astype(dtype)


def file_bytes(file: Any) -> bytes:
    """A file of bytes, or of a text in base64, which may be a data URL.

    Raises:
        BadInput: it is neither.
    """
    if isinstance(file, bytes):
        return file
    if not isinstance(file, str):
        raise BadInput(f"{type(file).__name__} is no image file", hint="bytes, or a text in base64")
    text = file.partition(",")[2] if file.startswith("data:") else file
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise BadInput("a text that is no base64", hint="send the file's bytes in base64") from None


def _fitted(step: DecodeImageStep, image: np.ndarray) -> np.ndarray:
    """The colors [H W 3] of an image at the step's size, from 0 to 255."""
    # Before it is resized: Pillow weights colors by their opacity.
    image = image[..., :3] if step.transparency == "ignore" else image
    height, width = image.shape[:2]
    size = step.height, step.width
    ratios = step.height / height, step.width / width
    if step.resize == "cover":
        # Cropped first: of an image a pixel wide, the size that covers a square would take gigabytes.
        tall, broad = (max(1, round(side / max(ratios))) for side in size)
        top, left = (max(0, whole - part) // 2 for whole, part in ((height, tall), (width, broad)))
        image = image[top : top + tall, left : left + broad]
    elif step.resize == "contain":
        tall, broad = (min(side, max(1, round(whole * min(ratios)))) for side, whole in zip(size, (height, width)))
        size = tall, broad
    pixels = resize_image(np.ascontiguousarray(image), *size).astype(np.float64)
    if pixels.shape[-1] == 4:
        share = pixels[..., 3:] / 255
        pixels = np.rint(pixels[..., :3] * share + step.background * (1 - share))
    top, left = (step.height - pixels.shape[0]) // 2, (step.width - pixels.shape[1]) // 2
    canvas = np.full((step.height, step.width, 3), float(step.background))
    canvas[top : top + pixels.shape[0], left : left + pixels.shape[1]] = pixels
    return canvas


def _texts(name: str, texts: Any, count: int | None = None) -> list[str]:
    """A list of texts; of `count`, where there must be so many."""
    texts = texts.tolist() if isinstance(texts, np.ndarray) else [texts] if isinstance(texts, str) else texts
    if isinstance(texts, list | tuple) and any(isinstance(text, bytes) for text in texts):
        raise BadInput(f"input `{name}`: a text is no UTF-8")
    if not isinstance(texts, list | tuple) or not texts or not all(isinstance(text, str) for text in texts):
        raise BadInput(f"`{name}` takes a list of texts", hint=f'"{name}": ["a text", "another"]')
    if count is not None and len(texts) != count:
        raise BadInput(f"`{name}` has {plural(len(texts), 'text')}, and there are {count} to pair them with")
    return list(texts)


def _prompts(step: TokenizeStep, names: Any, count: int) -> list[str]:
    """The prompt of each text. One name is that of all texts."""
    prompt_names = _texts(step.prompt_name, names)
    prompt_names = prompt_names * count if len(prompt_names) == 1 else _texts(step.prompt_name, prompt_names, count)
    if unknown := [name for name in prompt_names if name and name not in step.prompts]:
        raise BadInput(f"`{step.prompt_name}`: no prompt `{unknown[0][:64]}`", hint=nearest(unknown[0], list(step.prompts)))
    return [step.prompts[name] if name else step.prompt for name in prompt_names]


def _before(step: TokenizeStep, tokenizer: Tokenizer, prompts: Sequence[str]) -> dict[str, list[int]]:
    """The ids of each prompt."""
    different = [prompt for prompt in dict.fromkeys(prompts) if prompt]
    return dict(zip(different, tokenizer.encode_many([p.lower() if step.lower else p for p in different]), strict=True))


def _ids(step: TokenizeStep, tokenizer: Tokenizer, texts: list[str], prompts: Sequence[str]) -> list[list[int]]:
    full_texts = [(prompt + text).strip() if step.strip else prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    return tokenizer.encode_many([text.lower() if step.lower else text for text in full_texts])


def padded_rows(step: TokenizeStep, rows: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    """Rows of ids padded to the longest, and their mask."""
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
    mask = np.zeros_like(tokens)
    for i, row in enumerate(rows):
        tokens[i, : len(row)], mask[i, : len(row)] = row, 1
    return {step.tokens: tokens, step.mask: mask}


def at_unit_length(vectors: np.ndarray) -> np.ndarray:
    """Vectors scaled to length 1, with the same rounding as `infer.embed`."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def step_result(step: Any, outputs: Mapping[str, Any], tokenizer: Callable[[str], Tokenizer]) -> Any:
    """The output of a step after the program.

    Args:
        tokenizer: returns the tokenizer in a folder of the bundle.
    """
    if isinstance(step, NormalizeStep):
        return at_unit_length(outputs[step.output])
    if isinstance(step, ProbabilitiesStep):
        return probabilities(outputs[step.scores], step.step)
    if isinstance(step, LabelsStep):
        return [step.names[i] for i in np.argmax(outputs[step.scores], -1).tolist()]
    return detokenize_outputs(step, tokenizer(step.folder), outputs)


def probabilities(scores: np.ndarray, activation: str) -> np.ndarray:
    """Scores converted to probabilities by `softmax` or `sigmoid`."""
    if activation == "softmax":
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        return powers / powers.sum(-1, keepdims=True)
    # Both forms are exact where the other overflows.
    small = np.exp(-np.abs(scores))
    return np.where(scores >= 0, 1 / (1 + small), small / (1 + small)).astype(scores.dtype)


def detokenize_outputs(step: DetokenizeStep, tokenizer: Tokenizer, outputs: Mapping[str, Any]) -> list[str]:
    """The text of each row. It continues another text, so it keeps its leading space."""
    texts = []
    for row, length in zip(outputs[step.tokens], outputs[step.lengths], strict=True):
        stream = tokenizer.stream()
        stream.begun()
        texts.append("".join([stream.push(token) for token in row[:length].tolist()]) + stream.end())
    return texts


def bundled_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in a folder of a bundle."""
    from argosy.data.tokenizers.load import load_tokenizer

    return load_tokenizer(folder)
