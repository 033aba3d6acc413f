"""Generates text from a model during training."""

from collections.abc import Callable
from typing import Any

from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.infer.lm import LM
from argosy.models.parts.weight import merge
from argosy.observe.metrics import Metrics
from argosy.run.assembly.assembly import Assembly
from argosy.run.hooks.periodic import is_stopping
from argosy.run.settings.run import Run
from argosy.run.view import View


class Sampler:
    """Continues the run's prompt with the weights of a state. The step is folded into the seed, so samples of different steps use
    different random numbers.
    """

    def __init__(self, assembly: Assembly, settings: Run):
        self.assembly, self.settings, tokenizer = assembly, settings, assembly.tokenizer
        self.prompt = [0] if tokenizer is None else tokenizer.encode(settings.sample.prompt)
        if tokenizer is not None and (tokenizer.adds_bos or not self.prompt):
            first = tokenizer.bos if tokenizer.bos is not None else tokenizer.eos or 0
            self.prompt = [first, *self.prompt]
        if len(self.prompt) >= settings.model.context:
            raise BadInput(
                f"sample.prompt has {plural(len(self.prompt), 'token')}, but the model's context is {settings.model.context}",
                hint="shorten the prompt",
            )

    def __call__(self, state: Any, interrupted: Callable[[], bool] = lambda: False) -> str | None:
        """Generates the text. Returns it without the prompt; None if it was interrupted between two tokens."""
        sample, tokenizer = self.settings.sample, self.assembly.tokenizer
        model = merge(self.assembly.graph, state.inference_params, state.rest)
        model.dtype = self.assembly.decided.dtype
        lm = LM(self.settings.model, model, tokenizer)
        answers = lm.pieces(
            [self.prompt],
            sample.tokens,
            temperature=sample.temperature,
            seed=(self.settings.seed, int(state.step)),
            ignore_eos=True,
        )
        for _ in answers:
            if interrupted():
                return None
        answer = answers.completions[0]
        return answer.text if tokenizer is not None else " ".join(map(str, answer.tokens))


class SamplingHook:
    """Generates text from the current weights, and logs it with its prompt. A signal to stop ends it early."""

    def __init__(
        self,
        assembly: Assembly,
        settings: Run,
        metrics: Metrics,
        view: View,
        interrupted: Callable[[], bool] = lambda: False,
    ):
        self.assembly, self.sampler = assembly, Sampler(assembly, settings)
        self.settings, self.metrics, self.view = settings, metrics, view
        self.interrupted = interrupted

    def __call__(self, now: Any) -> None:
        if is_stopping(now, self.assembly.steps):
            return
        prompt, text = self.settings.sample.prompt, self.sampler(now.state, self.interrupted)
        if text is None:
            return
        self.metrics.write({"step": now.step, "sample": text, "prompt": prompt})
        self.view.sample(now.step, prompt, text)
