"""The settings of objectives, without jax, so that a mistake in them is reported before anything heavy is imported.

The settings of optimizers and schedules are in `train.optim` and `train.schedule`, which import jax only when they build.
"""

from typing import Any, ClassVar, Literal

from pydantic import Field

from argosy.core.registry import Registry
from argosy.core.settings import Settings

OBJECTIVES = Registry("objective", files=True)
OBJECTIVES.add("next_token", "argosy.train.settings:NextToken")
for _name, _settings in {
    "dpo": "DPO", "simpo": "SimPO", "cpo": "CPO", "orpo": "ORPO", "kto": "KTO",
    "reward": "RewardModel", "process_reward": "ProcessReward",
}.items():  # fmt: skip
    OBJECTIVES.add(_name, f"argosy.train.preferences:{_settings}")
OBJECTIVES.add("distill", "argosy.train.distillation:Distill")
OBJECTIVES.add("gkd", "argosy.train.distillation:GKD")
OBJECTIVES.add("uld", "argosy.train.distillation:ULD")
OBJECTIVES.add("gold", "argosy.train.distillation:GOLD")


class OfTokens(Settings):
    """How an objective computes the log-probabilities of tokens."""

    head: Literal["auto", "logits", "blocks", "chunks"] = "auto"
    """How the loss over the vocabulary is computed. logits: all at once; blocks: one block of the vocabulary at a time, fastest
    on CPUs; chunks: some rows at a time, recomputed in the backward pass, to save memory. auto: chunks if the logits would take
    more than 2 GiB per device, otherwise the fastest. All agree to rounding, also in bfloat16."""
    chunk: int = Field(1024, gt=0)
    """Rows of logits that exist at once with `head: chunks`."""


class NextToken(OfTokens):
    """Cross-entropy of the next token, normalized by the weight of all targets in the global batch."""

    z_loss: float = Field(0.0, ge=0)
    """Weight of the squared log partition function, which keeps logits near 0 (PaLM, arXiv:2204.02311, uses 1e-4)."""
    mtp: float = Field(0.3, ge=0)
    """Weight of the multi-token prediction loss, for models that have such modules: their mean cross-entropy is multiplied by it
    (arXiv:2412.19437, equation 25)."""

    rows_per_group: ClassVar[int] = 1

    def reads(self) -> Any:
        from argosy.train.objectives.next_token import FIELDS

        return FIELDS

    def __call__(self, models: Any, batch: Any, key: Any) -> Any:
        """Computes the `train.objectives.Loss`."""
        from argosy.train.objectives.next_token import loss

        return loss(self, models, batch, key)
