"""An opened model. Its settings are known, and its weights are read by per-layer name ("layers.3.attn.q.w"), one tensor at a time.
`checkpoint.open` opens models of any kind.
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
    # How sentence encoders pool token vectors.
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
    # How vision models resize and normalize images.
    "preprocessor_config.json",
    "processor_config.json",
)
"""Patterns of the small files that are copied with a model from folder to folder, byte for byte."""


@dataclass(frozen=True)
class OpenedModel:
    """An opened model whose weights are not read yet.

    path: the file or folder.
    kind: hub, gguf, argosy or peft.
    config: the settings of the model.
    weights: reads the weights, by per-layer name. If there are adapters, they are merged into the base's weights.
    companions: the folder with the model's small files, or the GGUF file, which contains a tokenizer.
    hub: the contents of config.json.
    adapted: the base and the adapters, for a run that trained adapters or a PEFT folder.
    blocks: the weights of a GGUF file in their quantized blocks.
    quantized: the arrays of a model that was quantized from another one. `weights` dequantizes them.
    published: returns the arrays of a model that was published quantized, such as DeepSeek-V3 in FP8, for which no unquantized
        original exists; None for others.
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
    """Builds a model's settings from the result of `dump`, which includes the name of the family.

    Raises:
        BadInput: the family is not registered, or it does not have these settings.
    """
    if (family := str(dumped.get("family"))) not in FAMILIES:
        problem = f"a model of the family `{family}`, which is not registered"
        raise BadInput(problem, hint=f"import the package that has it; {nearest(family, FAMILIES)}")
    return Choice(FAMILIES, tag="family").build(dumped)  # type: ignore[return-value]
