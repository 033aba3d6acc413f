"""An engine over several devices that share heads, features, vocabulary and cache."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from argosy.core.errors import BadInput
from argosy.infer import prompt_logprobs as prompts
from argosy.infer.engine.engine import Engine
from argosy.infer.engine.request import Request
from argosy.infer.forward.passes import PassKind, whole_sequences
from argosy.infer.lm import LM
from argosy.infer.load import load_lm
from argosy.infer.placement import weights_mesh
from argosy.infer.sampling import sampler
from argosy.infer.sampling.sample import Sampling
from argosy.infer.settings import MTP, DraftModel, EngineSettings, NGram
from argosy.infer.speculation.speculate import verify
from argosy.models import FAMILIES
from argosy.models.parts.weight import put, split
from argosy.weights import build as loading

SMALL = EngineSettings(slots=3, page=8, context=64, pages=20, budget=64, budget_decoding=32)
PROMPTS = [[(7 * i + k) % 90 for i in range(n)] for k, n in enumerate((5, 40, 17, 3, 21))]
STRUCTURES = [("llama", "plain"), ("qwen3_next", "mixed"), ("deepseek", "3.2"), ("gpt_oss", "plain"), ("gemma", "3")]


def step_program(engine: Engine) -> Any:
    """The program of its steps, where that is one."""
    forward: Any = engine.runner.forward
    return forward.program(forward.step_kind)


def requests() -> list[Request]:
    samplings = (Sampling(), Sampling(temperature=0.8, top_k=20), Sampling(presence_penalty=0.5))
    return [Request(ids, 12, samplings[i % 3], seed=i, top=2) for i, ids in enumerate(PROMPTS)]


def tokens(engine: Engine) -> list[list[Any]]:
    return [[(e.token, e.finish_reason) for e in events] for events in engine.generate(requests())]


# Heads, key heads or features of each divide by this.
COUNTS = {"qwen3_next": 3}


def split_over(module: Any, count: int) -> None:
    places = loading.tensor_shardings(module, count)
    put(module, {address: jax.device_put(a, places[address]) for address, a in split(module)[1].items()})


@pytest.mark.slow
@pytest.mark.parametrize(("family", "example"), STRUCTURES)
def test_several_devices_answer_as_one_does_and_compile_nothing_later(family: str, example: str):
    config = FAMILIES[family].examples()[example]
    module = loading.random_model(config, 0).module
    alone = tokens(Engine(module, SMALL))
    split_over(module, COUNTS.get(family, 2))
    engine = Engine(module, SMALL)
    number = engine.warm_up()
    programs = (step_program(engine), sampler.sample, sampler.write_slot)
    sizes = [program.compilations for program in programs]
    assert tokens(engine) == alone
    assert engine.stats.compilations == number
    assert [program.compilations for program in programs] == sizes


SPECULATIVE = [
    ("llama", "plain", DraftModel(model="itself", tokens=3)),
    ("qwen3_next", "mixed", NGram(tokens=3, lookup_min=1)),
    ("deepseek", "3", MTP(tokens=2)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "example", "method"), SPECULATIVE)
def test_several_devices_speculate_as_one_does_and_compile_nothing_later(family: str, example: str, method: Any):
    config = FAMILIES[family].examples()[example]
    module = loading.random_model(config, 0).module
    draft = module if isinstance(method, DraftModel) else None
    settings = SMALL.model_copy(update={"speculative": method})
    alone = tokens(Engine(module, SMALL))
    split_over(module, COUNTS.get(family, 2))
    engine = Engine(module, settings, draft=draft)
    number, programs = engine.warm_up(), (step_program(engine), sampler.sample, verify, engine.speculation._restored)
    sizes = [program.compilations for program in programs]
    assert tokens(engine) == alone
    assert engine.speculation.drafted
    assert engine.stats.compilations == number
    assert [program.compilations for program in programs] == sizes
    if draft is not None:
        assert sum(engine.speculation.accepted) == engine.speculation.drafted
        with pytest.raises(BadInput, match="devices of the model"):
            Engine(module, settings, draft=loading.random_model(config, 0).module)


SHARED = [
    ("llama", "plain", {"k", "v"}),
    ("qwen3_next", "mixed", {"row.q", "row.k", "row.v", "row.state"}),
    ("deepseek", "3", set()),
]


@pytest.mark.parametrize(("family", "example", "shared"), SHARED)
def test_each_device_has_its_heads_of_the_cache(family: str, example: str, shared: set[str]):
    module = loading.random_model(FAMILIES[family].examples()[example], 0).module
    split_over(module, COUNTS.get(family, 2))
    engine = Engine(module, SMALL)
    split_keys = {
        key for cache in engine.runner.caches.values() for key, a in cache.items() if a.sharding.shard_shape(a.shape) != a.shape
    }
    assert split_keys == shared
    assert weights_mesh(engine.weights()) is not None


@pytest.mark.slow
def test_a_folder_is_loaded_onto_two_devices(tmp_path: Path):
    config = FAMILIES["llama"].examples()["plain"]
    lm = LM(config, loading.random_model(config, 0).module)
    lm.save(tmp_path / "model")
    two = load_lm(tmp_path / "model", tensor=2)
    mine = lm.generate(PROMPTS, 8)
    assert [answer.tokens for answer in two.generate(PROMPTS, 8)] == [answer.tokens for answer in mine]
    assert any(len(a.devices()) == 2 and not a.is_fully_replicated for a in split(two.module)[1].values())
    with pytest.raises(BadInput, match="this process has 8 devices"):
        load_lm(tmp_path / "model", tensor=9)
    with pytest.raises(BadInput, match="divides neither the heads"):
        load_lm(tmp_path / "model", tensor=3)


def test_a_long_prompt_is_scored_on_two_devices_as_on_one_and_compiles_one_program(monkeypatch: pytest.MonkeyPatch):
    """A cache that came back in another layout would compile the second pass again."""
    monkeypatch.setattr(prompts, "PASS", 16)
    module = loading.random_model(FAMILIES["llama"].examples()["plain"], 0).module
    ids = [(7 * i) % 90 for i in range(60)]
    logprobs = []
    for count in (1, 2):
        if count == 2:
            split_over(module, 2)
        scorer = prompts.PromptScorer(module, 96)
        scorer.compile(scorer.sizes_of([ids]))
        forward: Any = scorer.sequences.forward
        program = forward.program(PassKind(whole_sequences, prompts._scored)) if count == 2 else None
        size = program and program.compilations
        passes = [scorer.score([ids]) for _ in range(4)]
        assert (program and program.compilations) == size
        (scores,) = passes[3]
        logprobs.append(scores.logprobs)
    np.testing.assert_allclose(*logprobs, rtol=1e-5, atol=1e-6)
