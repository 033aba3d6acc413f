"""Text from a model while it is trained."""

from typing import Any

import jax

from argosy.core.errors import BadInput
from argosy.infer.lm import LM
from argosy.jobs.assemble import Assembly
from argosy.jobs.run import Run
from argosy.models.parts.weight import merge


class Sampler:
    """Continues `sample.prompt` with the weights of a state. Draws are folded from seed and step, so no two samples share them."""

    def __init__(self, assembly: Assembly, settings: Run):
        self.assembly, self.settings, tokenizer = assembly, settings, assembly.tokenizer
        self.prompt = [0] if tokenizer is None else tokenizer.encode(settings.sample.prompt)
        if tokenizer is not None and (tokenizer.adds_bos or not self.prompt):
            first = tokenizer.bos if tokenizer.bos is not None else tokenizer.eos or 0
            self.prompt = [first, *self.prompt]
        if len(self.prompt) >= settings.model.context:
            raise BadInput(
                f"sample.prompt has {len(self.prompt)} tokens, the model's context is {settings.model.context}",
                hint="shorten the prompt",
            )

    def __call__(self, state: Any) -> str:
        sample, tokenizer = self.settings.sample, self.assembly.tokenizer
        model = merge(self.assembly.graph, state.params, state.rest)
        model.dtype = self.assembly.decided.dtype
        lm = LM(self.settings.model, model, tokenizer)
        folded = jax.random.fold_in(jax.random.key(self.settings.seed), int(state.step))
        seed = int(jax.random.bits(folded)) >> 1
        answer = lm.generate([self.prompt], sample.tokens, temperature=sample.temperature, seed=seed, ignore_eos=True)[
            0
        ]
        return answer.text if tokenizer is not None else " ".join(map(str, answer.tokens))
