"""Computes the CLIP score: whether images show what their captions say, by the vectors of CLIP.

    clip_score              100 mean max(cos(image, its caption), 0), with the scale of torchmetrics; the paper has 2.5 instead of 100
    clip_score_mismatched   the score of the same images with captions of other images, which a model would reach that ignores prompts
    clip_score_real         the score of held-out images with their captions
    clip_accuracy           the share of images to which their own caption is nearer than all others: zero-shot classification if
                            captions are classes, else R-precision (Xu et al. 2018, arXiv:1711.10485)
    clip_accuracy_real      the same for held-out images

See Hessel et al. 2021 (arXiv:2104.08718), equation 1. torchmetrics applies max(..., 0) to the mean, which differs only if cosines are
below 0. Results with different CLIP models or captions cannot be compared.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

SCALE = 100.0


class CaptionJudge:
    """Compares images with captions.

    Args:
        encoder: a CLIP model with `embed` and `embed_images` (`infer.clip.ImageTextEncoder`).
        captions: all captions that images may have. Equal captions count once.

    cut: the number of captions that are longer than the encoder's context, so that it reads only their beginning.
    """

    def __init__(self, encoder: Any, captions: Sequence[str]):
        self.encoder = encoder
        self.number = {text: i for i, text in enumerate(dict.fromkeys(captions))}
        self.vectors = encoder.embed(list(self.number), normalize=True)
        self.cut = encoder.cut(list(self.number))

    def cosines(self, images: Float[np.ndarray, "N H W 3"]) -> Float[np.ndarray, "N C"]:
        """The cosine of each image with each of the C distinct captions. Pixels are from 0 to 1."""
        return self.encoder.embed_images(list(images), normalize=True) @ self.vectors.T

    def figures(self, cosines: Float[np.ndarray, "N C"], captions: Sequence[str]) -> dict[str, float]:
        """The metrics of images. With a single distinct caption, only `clip_score`.

        Args:
            cosines: what `cosines` returned for the images.
            captions: the caption of each image.
        """
        count, rows = len(self.number), np.arange(len(cosines))
        columns = np.array([self.number[text] for text in captions])
        figures = {"clip_score": score(cosines[rows, columns])}
        if count > 1:
            figures["clip_score_mismatched"] = score(cosines[rows, (columns + 1 + rows % (count - 1)) % count])
            figures["clip_accuracy"] = float((cosines.argmax(1) == columns).mean())
        return figures


def score(cosines: Float[np.ndarray, "N"]) -> float:
    """The CLIP score of images, from the cosines with their captions."""
    return float(SCALE * np.maximum(cosines, 0).mean())


def figures_with_real(drawn: dict[str, float], real: dict[str, float]) -> dict[str, float]:
    """The metrics of generated images, each followed by that of real images with `_real` in its name."""
    figures = {}
    for name, value in drawn.items():
        figures[name] = value
        if name in real and name != "clip_score_mismatched":
            figures[f"{name}_real"] = real[name]
    return figures
