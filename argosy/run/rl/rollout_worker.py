"""A process that samples for a run. It holds the engine, receives weights, and completes its share of the prompts.

`run.rl.rollout_workers` calls the functions of this file and knows the run; this file knows only the engine.
"""

import pickle
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from argosy.infer.lm import LM
from argosy.infer.sampling.sample import Sampling
from argosy.models.parts.weight import Leaves
from argosy.rl.rollouts.completions import SampledCompletion, SamplingRequest, sample_completions
from argosy.run.rl.rollout_engine import RolloutEngine, checksums


class RolloutWorker:
    """The engine of this process.

    Args:
        engine: a pickled `RolloutEngine`.
        config: settings of jax by name, such as the folder of its compilation cache.
    """

    def __init__(self, engine: bytes, config: Mapping[str, Any]):
        for name, value in config.items():
            jax.config.update(name, value)
        self.engine: RolloutEngine = pickle.loads(engine)
        self.weights: Leaves = {}
        self.lm: LM | None = None

    def take(self, leaves: Mapping[str, jax.Array]) -> np.ndarray:
        """Receives the weights that have changed, by parameter name. Returns the checksum of every weight, in the order of the
        names."""
        device = jax.local_devices()[0]
        self.weights |= {a: jax.device_put(leaf, device) for a, leaf in leaves.items()}
        self.lm = self.engine(self.weights)
        self.lm.reset_prefix_cache()
        return np.asarray(checksums([self.weights[a] for a in sorted(self.weights)]))

    def answer(self, tokens: np.ndarray, lengths: np.ndarray, first: int, options: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Completes prompts. Returns the completions as arrays (`joined_completions`).

        Args:
            tokens: the tokens of all prompts, concatenated.
            lengths: the length of each prompt.
            first: the index of the first prompt among all prompts of the rollout.
            options: the fields of the `SamplingRequest`.
        """
        assert self.lm is not None, "prompts before weights"
        prompts = [prompt.tolist() for prompt in np.split(tokens, np.cumsum(lengths)[:-1])]
        sampling = Sampling.model_validate_json(options["sampling"])
        request = SamplingRequest(options["most"], sampling, tuple(options["seed"]), options["ignore_eos"])
        return joined_completions(sample_completions(self.lm, prompts, request, first=first))

    def sleep(self) -> None:
        """Frees the KV cache."""
        if self.lm is not None:
            self.lm.sleep()


def joined_completions(answers: list[SampledCompletion]) -> dict[str, np.ndarray]:
    """Converts completions to arrays, in which their tokens are concatenated."""
    return {
        "lengths": np.array([len(completion.tokens) for completion in answers], np.int64),
        "tokens": np.array([token for completion in answers for token in completion.tokens], np.int64),
        "logprobs": np.array([number for completion in answers for number in completion.logprobs], np.float64),
        "ended": np.array([completion.ended for completion in answers], np.bool_),
    }


def split_completions(arrays: Mapping[str, np.ndarray]) -> list[SampledCompletion]:
    """The inverse of `joined_completions`."""
    ends = np.cumsum(arrays["lengths"])[:-1]
    each = zip(np.split(arrays["tokens"], ends), np.split(arrays["logprobs"], ends), arrays["ended"].tolist(), strict=True)
    return [SampledCompletion(tokens.tolist(), logprobs.tolist(), ended) for tokens, logprobs, ended in each]
