"""The settings of adapters, which a run trains on a frozen base model. This module does not import jax, so that mistakes are reported
at once.

`put_on` changes a model whose weights are still shapes: it freezes the base, quantizes the base if the settings say so, and adds the
adapters. `adapt.base` then fills the model.
"""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from argosy.core.registry import Registry
from argosy.core.settings import Also, Repeats, Settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from argosy.models.parts.einsum import Contraction

# Matches every matrix of the layers, except routers and the gates of shared experts.
LAYERS = r"layers\.(?!.*\.(router|shared_gate)$).*"
HEAD, POOLER = "head", "pooler"
# The attribute of a model that holds the histories of delayed scaling (`adapt.scaling`).
AMAX = "amax"
WAY_OUT = "names are regular expressions over module paths: `argosy models show MODEL`, docs/adapters.md"

ADAPTERS = Registry("adapter")
ADAPTERS.add("none", "argosy.adapt.settings:NoAdapter")
ADAPTERS.add("lora", "argosy.adapt.settings:Lora")
ADAPTERS.add("dora", "argosy.adapt.settings:Dora")
ADAPTERS.add("qlora", "argosy.adapt.settings:Qlora")
ADAPTERS.add_installed("argosy.adapters")


class NoAdapter(Settings):
    """No adapter: every weight is trained."""

    trains_base: ClassVar[bool] = True


class LowRank(Settings):
    """Common settings of low-rank adapters. The base model is frozen; only the adapters, and the modules of `train`, are trained,
    optimized and saved.
    """

    trains_base: ClassVar[bool] = False

    rank: Annotated[int, Also("lora_r", "lora_rank", "lora_dim", "r", "peft_config.r", "lora.rank")] = Field(16, gt=0)
    """Columns of A and rows of B: the number of directions in which each matrix can change. Rank 16 has the capacity for some ten
    thousand examples; a rank too small for the data learns slower (thinkingmachines.ai/blog/lora).
    """
    alpha: Annotated[float, Also("lora_alpha", "peft_config.lora_alpha", "lora.alpha")] = Field(32.0, gt=0)
    """Scale of the adapter: its output is multiplied by alpha / rank. With a constant alpha the best learning rate hardly depends on
    the rank (thinkingmachines.ai/blog/lora, which uses 32).
    """
    rslora: Annotated[bool, Also("use_rslora", "lora_use_rslora", "peft_use_rslora")] = False
    """Multiplies by alpha / sqrt(rank) instead, so that high ranks learn as fast as low ones (arXiv:2312.03732)."""
    dropout: Annotated[float, Also("lora_dropout", "peft_config.lora_dropout", "lora.dropout")] = Field(0.0, ge=0, lt=1)
    """Share of the adapters' inputs that is set to zero in training, drawn anew in each step, for small data: QLoRA uses 0.1 up to 13B
    and 0.05 above (arXiv:2305.14314). Evaluations, samples and the reference have no dropout.
    """
    where: Annotated[
        str | None,
        Also(
            "lora_target_modules",
            "target_modules",
            "lora_target",
            "lora_target_linear",
            "lora_module_path",
            "lora_attn_modules",
            note="a regular expression over our module paths, which `argosy models show` prints",
        ),
    ] = None
    """The contractions that get an adapter: a regular expression that matches their whole path, such as
    `layers\\..*\\.attn\\.[qv]`. A pattern that matches nothing is an error. None: every matrix of the layers except routers
    and heads, because adapters on attention alone learn less (thinkingmachines.ai/blog/lora, arXiv:2305.14314); of denoisers that read
    text, the matrices of attention and feed-forward layers."""

    train: Annotated[
        list[str],
        Repeats(),
        Also("modules_to_save", "lora_modules_to_save", "additional_target", note="regular expressions over our module paths"),
    ] = Field(default_factory=list)
    """Modules that are trained in full beside the adapters and saved with them (PEFT's `modules_to_save`): regular expressions that
    match whole paths, such as `embed`, `head`, `.*norm`; `adapter.train=embed adapter.train=head` are two. One that matches nothing is
    an error. They carry no adapter. A head of scores is always among them. A head that is tied to the embedding is trained by
    `embed`."""

    onto: Literal["merge", "stack"] | None = None
    """What happens to the existing adapters of a base (a run that trained adapters, or a PEFT folder). merge: they are added to its
    weights, and the new ones are trained on the sum. stack: they stay frozen under the new ones, and both are saved as one adapter with
    the sum of their ranks, on the same base. None: such a base is refused.
    """

    def gain(self, rank: int | None = None) -> float:
        """The factor of the product of both matrices."""
        rank = rank or self.rank
        return self.alpha / (rank**0.5 if self.rslora else rank)

    def make(self, of: "Contraction") -> "Contraction":
        """Wraps a contraction with an adapter."""
        from argosy.adapt.lora import LoRA

        return LoRA(of, self.rank, self.alpha, gain=self.gain(), dropout=self.dropout)

    def quantize(self, model: Any) -> list[str]:
        """Quantizes the base of a model. Returns the names of the contractions, none by default."""
        return []

    def put_on(self, model: Any, dtype: Any = None, beneath: "Callable[[Any], Any] | None" = None) -> list[str]:
        """Freezes a model except the modules that are trained in full, quantizes it if the settings say so, and adds the adapters.
        Returns the names of the contractions with adapters, at least one.

        Args:
            model: a model whose weights are shapes, in any layout of the layers.
            dtype: the type of frozen weights; float32 by default.
            beneath: adds the frozen adapters of a stacked base to the model.

        Raises:
            BadInput: `where` or `train` matches nothing, both match the same module, or one is not a regular expression.
        """
        from argosy.adapt.base import frozen

        frozen(model, dtype, self.whole(model))
        self.quantize(model)
        if beneath is not None:
            beneath(model)
        return self._swap(model, "where", self.where, self.make)

    def whole(self, model: Any) -> list[str]:
        """The names of the modules that are trained in full.

        Raises:
            BadInput: a pattern of `train` matches nothing, matches no trainable weight, or is not a regular expression.
        """
        from flax import nnx

        from argosy.adapt.surgery import find_parts, inside
        from argosy.core.errors import BadInput
        from argosy.models.parts.weight import Frozen, variables

        names: list[str] = []
        # A head that is drawn is trained, and so is what an encoder has before it.
        heads = [HEAD] if model.config.causal else [HEAD, POOLER]
        for rule in [*self.train, *(heads if model.config.scored else [])]:
            try:
                parts = find_parts(model, rule)
            except BadInput as error:
                tied = rule == HEAD and model.config.tied
                hint = "the head is tied to the embedding: adapter.train=embed trains both" if tied else error.hint or WAY_OUT
                raise BadInput(f"adapter.train: {error.what}", where=error.where, hint=hint) from None
            weights = [v for a, v in variables(model).items() if any(inside(a, name) for name in parts)]
            if not any(isinstance(v, nnx.Param | Frozen) for v in weights):
                raise BadInput(f"adapter.train: nothing that gradients train matches `{rule}`", hint=WAY_OUT)
            names += [name for name in parts if name not in names]
        return names

    def _swap(self, model: Any, key: str, where: str | None, make: "Callable[[Contraction], Contraction]") -> list[str]:
        """Replaces the contractions that a setting names, or by default every matrix of the layers that is not trained in full. Returns
        their names, at least one."""
        from argosy.adapt.surgery import find, inside, put_at
        from argosy.core.errors import BadInput, some

        whole = self.whole(model)
        try:
            contractions = find(model, where or model.config.adapted or LAYERS)
        except BadInput as error:
            raise BadInput(f"adapter.{key}: {error.what}", where=error.where, hint=error.hint or WAY_OUT) from None
        both = [name for name in contractions if any(inside(name, other) for other in whole)]
        if both and where is not None:
            raise BadInput(f"adapter.{key} and adapter.train both match {some(both)}", hint="leave them out of one")
        names = [name for name in contractions if name not in both]
        if not names:
            raise BadInput("adapter.train leaves nothing to put an adapter on", hint="adapter=none trains every weight")
        for name in names:
            put_at(model, name, make(contractions[name]))
        return names


class Lora(LowRank):
    """Low-rank adapters: y = W x + alpha / rank B A x. Hu et al. 2021 (arXiv:2106.09685)."""

    init: Annotated[
        Literal["zero", "pissa"], Also("init_lora_weights", "peft_init_lora_weights", "pissa_init", note="true is zero")
    ] = "zero"
    """Initialization of the factors. zero: A is random and B zero. pissa: from the largest singular values of W, which learns faster
    (arXiv:2404.02948); their initial product is subtracted, so that the model starts unchanged either way.
    """
    pissa_iterations: Annotated[int | None, Also("pissa_iter", "pissa_niter")] = Field(None, gt=0)
    """Subspace iterations of a randomized SVD for `init=pissa`: 16 take seconds for a 7B model. None: the exact SVD, minutes to
    hours."""

    def make(self, of: "Contraction") -> "Contraction":
        from argosy.adapt.lora import LoRA

        return LoRA(of, self.rank, self.alpha, gain=self.gain(), start=self.init == "pissa", dropout=self.dropout)


class Dora(LowRank):
    """Weight-decomposed adapters: the magnitude of each output channel of W + alpha / rank B A is trained separately from its
    direction. Liu et al. 2024 (arXiv:2402.09353). They are closer to full fine-tuning at low ranks, for about a fifth more time per
    step.
    """

    def make(self, of: "Contraction") -> "Contraction":
        from argosy.adapt.lora import DoRA

        return DoRA(of, self.rank, self.alpha, gain=self.gain(), dropout=self.dropout)


class Qlora(LowRank):
    """Low-rank adapters on a quantized base. Dettmers et al. 2023 (arXiv:2305.14314). Unlike in the paper, the scales of blocks are not
    quantized again: they stay float32, half a bit per weight.
    """

    format: Annotated[
        Literal["nf4", "int4", "int8"],
        Also("load_in_4bit", "bnb_4bit_quant_type", "quantization_bit", note="nf4, the default, is bitsandbytes' 4 bit"),
        Also("load_in_8bit", note="adapter.format=int8"),
    ] = "nf4"
    """Number format of the base. nf4: 16 levels that are equally likely for normal weights, in blocks; int4: 16 evenly spaced
    levels, in blocks; int8: one scale for each output channel."""
    block: Annotated[int, Also("bnb_4bit_blocksize", "quant_block_size")] = Field(64, gt=0)
    """Largest number of weights that share a scale in nf4 and int4, along the summed axis; the largest divisor of that axis up to this
    is used.
    """
    quantize_where: str | None = None
    """The contractions to quantize, as in `where`. None: every matrix of the layers except routers and heads."""

    def quantize(self, model: Any) -> list[str]:
        from argosy.adapt.quant import Scheme, quantized_einsum

        scheme = Scheme(self.format, None if self.format == "int8" else self.block)
        return self._swap(model, "quantize_where", self.quantize_where, lambda of: quantized_einsum(of, scheme))
