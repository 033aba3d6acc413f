"""CLIP score: whether images show what they were drawn from, by the vectors of CLIP.

    clip_score              100 mean max(cos(image, its caption), 0)     torchmetrics' scale; the paper has 2.5 in place of 100
    clip_score_mismatched   the same images with captions of others: what a model reaches that ignores its prompts
    clip_score_real         held-out images with their captions
    clip_accuracy           share of images whose own caption is the nearest of all: zero-shot classification where captions are
                            classes, else R-precision (Xu et al. 2018, arXiv:1711.10485). `_real`: of held-out images

Hessel et al. 2021 (arXiv:2104.08718), equation 1. torchmetrics takes the larger of 0 and the mean, which differs only where cosines
are below 0. Figures of another CLIP, and of other captions, are other figures.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

SCALE = 100.0


class CaptionJudge:
    """Compares images with captions.

    Args:
        encoder: CLIP: `embed` and `embed_images` (`infer.clip.ImageTextEncoder`).
        captions: all that images may have; equal ones count once.

    cut: how many of them are longer than what the encoder reads, which is their beginning.
    """

    def __init__(self, encoder: Any, captions: Sequence[str]):
        self.encoder = encoder
        self.number = {text: i for i, text in enumerate(dict.fromkeys(captions))}
        self.vectors = encoder.embed(list(self.number), normalize=True)
        self.cut = encoder.cut(list(self.number))

    def cosines(self, images: Float[np.ndarray, "N H W 3"]) -> Float[np.ndarray, "N C"]:
        """The cosine of each image, in 0..1, with each different caption."""
        return self.encoder.embed_images(list(images), normalize=True) @ self.vectors.T

    def figures(self, cosines: Float[np.ndarray, "N C"], captions: Sequence[str]) -> dict[str, float]:
        """The figures of images with these captions; of a single one, none is another's.

        Args:
            captions: the one of each image.
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
    """The figures of drawn images, each followed by that of real ones."""
    figures = {}
    for name, value in drawn.items():
        figures[name] = value
        if name in real and name != "clip_score_mismatched":
            figures[f"{name}_real"] = real[name]
    return figures
