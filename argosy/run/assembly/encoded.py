"""Encodes the images and captions of a run by frozen models before training, and the prompts that the run draws during training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from argosy.core.errors import BadInput
from argosy.core.progress import Say
from argosy.data.images.encoded import EncodedImages
from argosy.data.images.folder import ImageFolder
from argosy.data.images.prior import PriorImages
from argosy.data.images.table import ImageRows, ImageSource
from argosy.data.sources import RowSource
from argosy.data.tables import corpus_cache
from argosy.infer.denoise.encoders import RunEncoders
from argosy.models.diffusion.base import Conditions
from argosy.run.assembly.class_images import class_images
from argosy.run.assembly.decided import Decided
from argosy.run.settings.run import Run
from argosy.run.start.learned_tokens import template_ids
from argosy.train.objectives.images.controlnet import ControlNetDiffusion
from argosy.train.objectives.images.dreambooth import DreamBooth
from argosy.train.objectives.images.textual_inversion import TextualInversion


@dataclass(frozen=True)
class SamplePrompts:
    """The encoded prompts that a run draws during training. They are computed before the first step, so that text encoders can be
    freed.

    texts: the prompts.
    states: the hidden states `text` [P + 1 S E], the attention mask `text_mask` [P + 1 S] and the pooled vectors `pooled` [P + 1 O] of
        the empty prompt and of the P prompts.
    controls: the first control images of the data [N Y X 3] in 0..1, for a ControlNet; otherwise None.
    captions: the caption of each control image.
    """

    texts: tuple[str, ...]
    states: dict[str, np.ndarray]
    controls: np.ndarray | None = None
    captions: tuple[str, ...] = ()

    def encode(self, texts: Sequence[str]) -> Conditions:
        order = np.array([0 if not text else 1 + self.texts.index(text) for text in texts])
        return Conditions(**{name: jnp.asarray(values[order]) for name, values in self.states.items()})

    def null(self, count: int) -> Conditions:
        return self.encode([""] * count)


class EncodedData:
    """The images and captions of a run, encoded by its frozen encoders.

    Raises:
        BadInput: the data have no images, or the encoders do not fit the model.
    """

    def __init__(self, run: Run, decided: Decided, images: Any, say: Say):
        if not isinstance(images, ImageSource):
            raise BadInput("encoders are for images, and this data has none", where=f"data.source={run.data.source_name}")
        self.run, self.images = run, images
        self.controlled = isinstance(run.objective, ControlNetDiffusion)
        self.encoders = RunEncoders(run.encoders, run.model, decided.dtype, say)
        if self.controlled:
            images.read_controls()
            self._check_controls(3 if self.encoders.space is None else self.encoders.space.channels)
        dropout = run.objective.label_dropout if run.objective.condition == "text" else 0.0
        options: Any = {"dropout": dropout, "say": say}
        cache = corpus_cache(run.data)
        if isinstance(run.objective, TextualInversion):
            options["prompts"] = template_ids(run.model, run.objective, str(run.encoders.pipeline))
        self.source: RowSource = EncodedImages(images, self.encoders, cache, **options)
        if isinstance(run.objective, DreamBooth):
            folder = class_images(run, run.objective, decided.dtype, say)
            image = run.data.image.model_copy(update={"caption": run.objective.class_prompt})
            self.source = PriorImages(self.source, EncodedImages(ImageFolder(str(folder), image), self.encoders, cache, **options))

    def _check_controls(self, channels: int) -> None:
        """Checks that there are control images.

        Raises:
            BadInput: there are none.
        """
        if all(table.controls is None for held_out in (False, True) for table, _ in self.images.splits(held_out, channels)):
            hint = "`conditioning_image` in each line of metadata.jsonl, or a column of that name; an array `conditioning_images`"
            raise BadInput("a ControlNet reads control images, and this data has none", where=self.images.where, hint=hint)

    def finish(self, sizes: Mapping[str, int]) -> SamplePrompts | None:
        """Encodes the prompts to draw during training, and frees the encoders. Call it after the data are encoded.

        Args:
            sizes: the sizes of the axes of the encoded data, by letter.

        Raises:
            BadInput: the hidden states of captions have another width than the model reads.
        """
        widths = {"e": ("text_width", "states"), "o": ("pooled_width", "vector")}
        for letter, (name, label) in widths.items() if self.encoders.reads_text else ():
            expected, actual = getattr(self.run.model, name, None), sizes.get(letter)
            if expected is not None and actual is not None and expected != actual:
                problem = f"the {label} of a caption: {actual:,} numbers, and model.{name} = {expected:,}"
                raise BadInput(problem, hint=f"model.{name}={actual}, or another text encoder")
        sample_prompts = None
        if self.run.sample.every and self.encoders.reads_text:
            captions, controls = self._examples()
            texts = tuple(dict.fromkeys(self.run.sample.prompts or captions))
            sample_prompts = SamplePrompts(texts, self.encoders.states(["", *texts]), controls, tuple(captions))
        self.encoders.release()
        return sample_prompts

    def _examples(self) -> tuple[list[str], np.ndarray | None]:
        """Returns the first captions of the data, from the held-out split if there is one. For a ControlNet, also returns their control
        images, which have one size."""
        channels = 3 if self.encoders.space is None else self.encoders.space.channels
        for held_out in (True, False):
            parts = self.images.splits(held_out, channels)
            if not self.controlled:
                captions = [table.captions[int(i)] for table, selection in parts if table.captions is not None for i in selection]
                if captions:
                    return captions[: self.run.sample.images], None
                continue
            for table, selection in parts:
                rows = np.arange(min(len(selection), self.run.sample.images))
                if table.captions is not None and len(rows):
                    fields = ImageRows(table, selection, self.images.settings, 0, trains=False).controls(rows, rows)
                    return [table.captions[int(selection[i])] for i in rows], fields["control"]
        return [""], None
