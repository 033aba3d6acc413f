"""A model at rest, opened: its settings are known, and its weights are read by per-layer name ("layers.3.attn.q.w"), one tensor at a
time. `checkpoint.open` opens any kind.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from argosy.core.errors import BadInput, nearest
from argosy.core.formats import TensorReader
from argosy.core.settings.schema import Choice
from argosy.data.tokenizers.load import BESIDE, VOCABULARIES
from argosy.models import FAMILIES
from argosy.models.base.language import LanguageConfig

if TYPE_CHECKING:
    from argosy.weights.adapted import AdaptedModel
    from argosy.weights.gguf.blocks import BlockedWeights
    from argosy.weights.quantized import QuantizedWeights

COMPANIONS = (
    *VOCABULARIES,
    *BESIDE,
    "generation_config.json",
    # Sentence encoders say there how token vectors are pooled.
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
    # Models that see say there how images are resized and normalized.
    "preprocessor_config.json",
    "processor_config.json",
)
"""Patterns of the small files that are copied with a model from folder to folder, byte for byte."""


@dataclass(frozen=True)
class OpenedModel:
    """An opened model whose weights are not read yet.

    kind: hub, gguf, argosy or peft.
    weights: by per-layer name; under `adapted` those of the base, with the adapters merged as they are read.
    companions: the folder of its small files, or the GGUF file, which contains a tokenizer.
    hub: its config.json.
    adapted: the base and the adapters of a run that trained adapters, or of a PEFT folder.
    blocks: the weights of a GGUF file as they lie there.
    quantized: the arrays of weights that were rounded from those of another model; `weights` has their floats.
    published: gives likewise the arrays of a model that was published in few bits, as DeepSeek-V3 in FP8: there is no other to quantize
        in its place.
    """

    path: Path
    kind: str
    config: LanguageConfig
    weights: TensorReader
    companions: Path | None = None
    hub: dict[str, Any] = field(default_factory=dict)
    adapted: "AdaptedModel | None" = None
    blocks: "BlockedWeights | None" = None
    quantized: "QuantizedWeights | None" = None
    published: "Callable[[], QuantizedWeights | None]" = lambda: None


def config_of(dumped: dict[str, Any]) -> LanguageConfig:
    """A model's settings from what `dump` wrote, including its family.

    Raises:
        BadInput: the family is not registered here, or it does not have these settings.
    """
    if (family := str(dumped.get("family"))) not in FAMILIES:
        problem = f"a model of the family `{family}`, which is not registered"
        raise BadInput(problem, hint=f"import the package that has it; {nearest(family, FAMILIES)}")
    return Choice(FAMILIES, tag="family").build(dumped)  # type: ignore[return-value]
