"""Samples during training."""

from types import SimpleNamespace

import pytest
from laws.families import CASES, noisy_model

from argosy.models.parts.stack import Unroll
from argosy.models.parts.weight import split
from argosy.run.hooks.samples import Sampler


@pytest.fixture(scope="module")
def sample():
    """(seed, step) -> the tokens of a sample, weights unchanged."""
    config = CASES["llama-plain"]
    graph, weights = split(model := noisy_model(config, Unroll()))
    assembly = SimpleNamespace(tokenizer=None, graph=graph, decided=SimpleNamespace(dtype=model.dtype))

    def sample(seed, step):
        sample_settings = SimpleNamespace(prompt="", tokens=12, temperature=1.0)
        run = SimpleNamespace(sample=sample_settings, model=config, seed=seed)
        return Sampler(assembly, run)(SimpleNamespace(params=weights, rest={}, step=step))

    return sample


def test_each_step_samples_with_fresh_randomness_and_no_two_runs_share_it(sample):
    """Seed and step added would give step 1 of seed 0 the sample of step 0 of seed 1."""
    texts = [sample(seed, step) for seed in (0, 1, 2**32) for step in (0, 1, 2)]
    assert len(set(texts)) == len(texts)
    assert sample(0, 1) == texts[1]
