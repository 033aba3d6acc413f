"""The autoencoder of Flux.2: that of latent diffusion, whose latents are packed two by two and normalized.

    z = (pack(mean) - m) / sqrt(v + eps)        pack: the four neighbors of each channel become channels [h w (C 2 2)]

m and v are averages over the images that it was trained on, stored beside its weights: a batch norm without weights (Ioffe and Szegedy
2015, arXiv:1502.03167) that does not move any more. Denoisers read four times as many channels, of half the height and width. Black
Forest Labs 2025 (FLUX.2).
"""

from typing import Any

from pydantic import Field

from argosy.core.keymap import KeyRow
from argosy.models import parts
from argosy.models.autoencoders.autoencoder_kl import AutoencoderKLConfig
from argosy.models.hub.autoencoders import AutoencoderKLFlux2Hub

# Neighbors in each direction that are packed.
PACK = 2


class AutoencoderKLFlux2Config(AutoencoderKLFlux2Hub, AutoencoderKLConfig):
    """The autoencoder of Flux.2."""

    stats_eps: float = Field(1e-4, gt=0)
    """Added to the variance of packed latents."""

    @classmethod
    def examples(cls) -> dict[str, Any]:
        odd: dict[str, Any] = {"groups": 2, "latent_channels": 3, "force_upcast": False}
        return {"plain": cls(**odd, widths=(6, 10), layers=1, moments_conv=False, latents_conv=False, attention=False, stats_eps=1e-2)}

    @property
    def factor(self) -> int:
        return PACK * super().factor

    def hub_rows(self) -> tuple[list[KeyRow], dict[str, int]]:
        rows, sizes = super().hub_rows()
        more = {"running_mean": "mean", "running_var": "variance"}
        rows = [*rows, *(KeyRow(f"bn.{theirs}", f"bn.{ours}", "packed -> packed") for theirs, ours in more.items())]
        return rows, sizes | {"packed": self.latent_channels * PACK**2}

    def build(self, run: "parts.Execution | None" = None) -> Any:
        """The module. Its layers are no stack: `run` says what is computed again, and no more."""
        from argosy.models.blocks.autoencoder_kl import AutoencoderKLFlux2

        return AutoencoderKLFlux2(self, "none" if run is None else run.remat)
