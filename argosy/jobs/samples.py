"""Text from a model while it is trained."""

from typing import Any

from argosy.infer.lm import LM
from argosy.jobs.assemble import Assembly
from argosy.jobs.run import Run
from argosy.models.parts.weight import merge


class Sampler:
    """Continues the run's prompt with the weights of a state. The draws depend on the step: each sample sees fresh randomness."""

    def __init__(self, assembly: Assembly, settings: Run):
        self.assembly, self.settings = assembly, settings
        self._lm: LM | None = None

    def __call__(self, state: Any) -> str:
        sample = self.settings.sample
        if self._lm is None:
            model = merge(self.assembly.graph, state.params, state.rest)
            model.dtype = self.assembly.decided.dtype
            self._lm = LM(self.settings.model, model, self.assembly.tokenizer)
        self._lm.decoder.weights = state.params | state.rest
        tokenizer = self.assembly.tokenizer
        if tokenizer is None:
            prompt: Any = [0]
        else:
            prompt = tokenizer.encode(sample.prompt) or [
                tokenizer.bos if tokenizer.bos is not None else tokenizer.eos or 0
            ]
        most = min(sample.tokens, self.settings.model.context - len(prompt))
        seed = self.settings.seed + int(state.step)
        answer = self._lm.generate([prompt], most, temperature=sample.temperature, seed=seed, ignore_eos=True)[0]
        self._lm.decoder.weights = {}  # the loop gives these buffers away at the next step
        return answer.text if tokenizer is not None else " ".join(map(str, answer.tokens))
