"""Prompts in bundles of image models. Their token ids are inputs of the program, which contains the text encoders.

    prompt            -> prompt_ids, prompt_mask, prompt_ids_2 ...              ids and mask for each text encoder
    negative_prompt   -> negative_prompt_ids ...                                optional, with classifier-free guidance
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from argosy.export.manifest import TensorSignature
from argosy.export.model import tokenizer_files
from argosy.export.signatures import BATCH
from argosy.export.steps import EncoderTokens, TokenizePromptStep
from argosy.infer.denoise.prompts import EncoderPrompts
from argosy.models.diffusion.base import Conditions

PROMPT, NEGATIVE = "prompt", "negative_prompt"


class BundledPrompts:
    """The text encoders of a pipeline in its bundle.

    Args:
        prompts: the text encoders of the pipeline.
        guided: whether there are inputs for negative prompts.

    Raises:
        BadInput: a chat template changes prompts.
    """

    def __init__(self, prompts: EncoderPrompts, guided: bool):
        self.prompts = prompts
        ends = [f"_{i + 1}" if i else "" for i in range(len(prompts.readers))]
        self.readers = dict(zip(ends, prompts.readers, strict=True))
        self.steps = [self._step(name) for name in (PROMPT, *([NEGATIVE] if guided else []))]

    @property
    def files(self) -> dict[str, bytes]:
        """The files of the tokenizers."""
        every = (tokenizer_files(reader.tokenizer, f"tokenizer{end}") for end, reader in self.readers.items())
        return {name: content for files in every for name, content in files.items()}

    @property
    def modules(self) -> nnx.Dict:
        """The text encoders, whose embeddings include learned tokens."""
        return nnx.Dict({f"text_encoder{end}": reader.full_module for end, reader in self.readers.items()})

    def _step(self, name: str) -> TokenizePromptStep:
        encoders = []
        for end, reader in self.readers.items():
            (prefix_ids, suffix_ids), (prefix, suffix) = reader.frame, reader.affixes()
            names: Any = {"folder": f"tokenizer{end}", "tokens": f"{name}_ids{end}", "mask": f"{name}_mask{end}"}
            names["learned"] = reader.learned_tokens.ids
            affixes: Any = {"prefix_ids": prefix_ids, "suffix_ids": suffix_ids, "prefix": prefix, "suffix": suffix}
            encoders.append(EncoderTokens(**names, **affixes, length=reader.length, pad=reader.pad, pad_left=reader.pads_left))
        return TokenizePromptStep(input=name, encoders=encoders, unescape=self.prompts.unescapes)

    def inputs(self) -> Iterator[TensorSignature]:
        """Yields the inputs of the program. The inputs for negative prompts are optional."""
        for step in self.steps:
            of, default = step.input.replace("_", " "), 0 if step.input == NEGATIVE else None
            for encoder, reader in zip(step.encoders, self.readers.values(), strict=True):
                tensor_fields: Any = {"shape": [BATCH, encoder.length], "dtype": "int32", "default": default, "minimum": 0}
                learned_rows = sum(map(len, reader.learned.values()))
                about, most = f"ids of the {of} by `{encoder.folder}`", reader.module.config.vocab + learned_rows - 1
                yield TensorSignature(name=encoder.tokens, description=about, pad=encoder.pad, maximum=most, **tensor_fields)
                yield TensorSignature(name=encoder.mask, description="1 for tokens, 0 for padding", maximum=1, **tensor_fields)

    def conditions(self, modules: Mapping[str, Any], inputs: Mapping[str, Any]) -> Conditions:
        """Computes the conditions of the prompts."""
        for end, reader in self.readers.items():
            modules[f"text_encoder{end}"].dtype = reader.module.dtype
        return self._encoded(self.steps[0], modules, inputs)

    def base(self, modules: Mapping[str, Any], inputs: Mapping[str, Any], none: Mapping[str, Array]) -> Conditions:
        """Computes the negative conditions of guidance: in each row those of the negative prompt, or `none` without one. `conditions`
        must be called before."""
        step = self.steps[1]
        has_negative = jnp.stack([inputs[encoder.mask].any(1) for encoder in step.encoders]).any(0)

        def encoded() -> dict[str, Array]:
            conditions = self._encoded(step, modules, inputs)._asdict()
            return {k: jnp.where(has_negative.reshape(-1, *(1,) * (v.ndim - 1)), conditions[k], v) for k, v in none.items()}

        # Encoders run for negative prompts only if there are any.
        return Conditions(**jax.lax.cond(has_negative.any(), encoded, lambda: dict(none)))

    def _encoded(self, step: TokenizePromptStep, modules: Mapping[str, Any], inputs: Mapping[str, Any]) -> Conditions:
        states = []
        for encoder, (end, reader) in zip(step.encoders, self.readers.items(), strict=True):
            module, mask = modules[f"text_encoder{end}"], inputs[encoder.mask]
            attended = mask if self.prompts.masked else jnp.ones_like(mask)
            states.append(reader.computed(module, inputs[encoder.tokens], attended) | {"mask": mask})
        return self.prompts.conditions(states)


def bundled_prompts(prompts: Any, guided: bool) -> BundledPrompts | None:
    """Returns the text encoders of a pipeline for its bundle; None for class-conditional models."""
    return BundledPrompts(prompts, guided) if isinstance(prompts, EncoderPrompts) else None
