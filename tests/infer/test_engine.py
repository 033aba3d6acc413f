"""The engine against the whole sequence computed again for every token: the same tokens whoever else is there, however prompts are
cut and pages run out."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from helpers import default

from argosy.core.errors import BadInput
from argosy.infer.engine import batch, cache
from argosy.infer.engine import runner as runner_module
from argosy.infer.engine.batch import BatchBuilder
from argosy.infer.engine.engine import Engine
from argosy.infer.engine.request import Request
from argosy.infer.forward.passes import ByLayer, OneProgram, forward_of
from argosy.infer.forward.step import PageTables
from argosy.infer.lm import LM
from argosy.infer.sampling import sampler
from argosy.infer.sampling.sample import Sampling, apply_penalties, next_tokens, random_streams, sampling_columns
from argosy.infer.settings import EngineSettings
from argosy.models import FAMILIES
from argosy.models.mixtral import MixtralConfig
from argosy.models.parts.attention import cache as layer_cache
from argosy.models.parts.attention.cache import bytes_of_caches, empty_pools
from argosy.models.parts.stack import Scan, Unroll
from argosy.models.parts.stack.addresses import from_layers
from argosy.models.parts.weight import put, split
from argosy.weights import build
from argosy.weights.build import default_run, random_model

LENGTHS = (5, 40, 17, 3, 64, 33, 2, 21)
TIGHT = EngineSettings(slots=4, page=8, context=96, pages=13, budget=64, budget_decoding=32)


def lm_of(family: str, example: str) -> LM:
    config = FAMILIES[family].examples()[example]
    return LM(config, random_model(config, 0).module)


@pytest.fixture(scope="module")
def lm() -> LM:
    return lm_of("llama", "plain")


@pytest.fixture(scope="module")
def engine(lm: LM) -> Engine:
    """One engine for all tests: what one leaves behind must not change another."""
    return Engine(lm.module, TIGHT)


def prompts(vocab: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocab, n).tolist() for n in lengths]


def alone(lm: LM, prompt: list[int], most: int, sampling: Sampling | None = None, seed: int = 0, row: int = 0) -> list[int]:
    """The answer by the whole sequence again for every token."""
    settings, keys = sampling_columns([sampling or Sampling()]), random_streams(seed, [row])
    ids, answer = list(prompt), []
    for i in range(most):
        logits, counts = lm.logits([ids])[:, -1], np.bincount(answer, minlength=lm.config.vocab)[None].astype(np.int32)
        seen = np.bincount(ids, minlength=lm.config.vocab)[None] > 0
        answer.append(int(choose_token(logits, settings, keys, seen, counts, i)))
        ids.append(answer[-1])
    return answer


@jax.jit
def choose_token(logits: Any, settings: Any, keys: Any, seen: Any, counts: Any, i: Any) -> Any:
    keys = jax.vmap(lambda key: jax.random.fold_in(key, i))(keys)
    return next_tokens(logits, apply_penalties(logits, settings, seen, counts), settings, keys).tokens[0]


def answers(engine: Engine, requests: list[Request]) -> list[list[int]]:
    numbers = [engine.add(request) for request in requests]
    tokens_of: dict[int, list[int]] = {number: [] for number in numbers}
    for event in engine.run():
        if event.token is not None:
            tokens_of[event.id].append(event.token)
    assert engine.pages.free == engine.pages.count, "every page came back"
    return [tokens_of[number] for number in numbers]


SAMPLED = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.3}


@pytest.mark.parametrize("sampling", default(SAMPLED, of=[{}, SAMPLED]), ids=["greedy", "sampled"])
def test_tokens_are_those_of_decoding_alone_though_pages_run_out(lm: LM, engine: Engine, sampling: dict):
    token_rows = prompts(lm.config.vocab, (5, 9, 6, 3, 12, 7))
    expected = [alone(lm, p, 28, Sampling(**sampling), 3, i) for i, p in enumerate(token_rows)]
    before = engine.scheduler.preemptions
    outputs = answers(engine, [Request(p, 28, Sampling(**sampling), seed=3, row=i) for i, p in enumerate(token_rows)])
    assert outputs == expected
    assert engine.scheduler.preemptions > before, "13 pages of 8 tokens hold no four of these"


STRUCTURES = [
    ("gemma", "3"),
    ("qwen3_next", "mixed"),
    ("deepseek", "3.2"),
    ("deepseek", "2-lite"),
    ("gpt_oss", "plain"),
    ("llama4", "interleaved"),
    ("mixtral", "plain"),
    ("gpt2", "untied"),
]


STEPPED = [("llama", "plain"), ("gemma", "3"), ("qwen3_next", "mixed")]
WINDOWED = [("gemma", "3", 6), ("gpt_oss", "plain", 7), ("llama4", "interleaved", 8)]


@pytest.mark.slow
@pytest.mark.parametrize("family, example, window", default(WINDOWED[0], of=WINDOWED))
def test_layers_with_windows_give_pages_back_and_answers_stay(family: str, example: str, window: int):
    """With prompts computed in pieces, preemption, and beginnings found in the prefix cache."""
    config = FAMILIES[family].examples()[example].model_copy(update={"window": window})
    lm = LM(config, random_model(config, 0).module)
    engine = Engine(lm.module, EngineSettings(slots=4, page=4, context=96, pages=38, budget=32, budget_decoding=32))
    ((which, pages),) = [(pool.window.tokens, pool.pages.count) for pool in engine.scheduler.pools]
    assert (which, pages < engine.pages.count) == (window, True)
    token_rows = prompts(lm.config.vocab, (5, 70, 17, 40, 33))
    requests = [Request(p, 12) for p in token_rows]
    for _ in range(2):
        outputs = [[event.token for event in events] for events in engine.generate(requests)]
        for request, tokens in zip(requests, outputs, strict=True):
            whole = lm.logits([[*request.tokens, *tokens]])[0].argmax(-1)
            assert tokens == whole[len(request.tokens) - 1 : -1].tolist()
        requests = [Request([*p, *tokens, 1], 6) for p, tokens in zip(token_rows[-2:], outputs[-2:], strict=True)]
    assert engine.scheduler.preemptions > 0
    assert engine.stats.reused_tokens > 0
    assert engine.scheduler.is_empty


@pytest.mark.slow
@pytest.mark.parametrize("family, example", STRUCTURES)
def test_every_structure_is_served_in_pieces_and_rows(family: str, example: str):
    lm = lm_of(family, example)
    token_rows = prompts(lm.config.vocab, (5, 40, 17))
    for prompt, answer in zip(token_rows, answers(Engine(lm.module, TIGHT), [Request(p, 8) for p in token_rows]), strict=True):
        whole = lm.logits([[*prompt, *answer]])[0].argmax(-1)
        assert answer == whole[len(prompt) - 1 : -1].tolist()


def test_what_a_request_asks_for_compiles_nothing(lm: LM, engine: Engine):
    token_rows = prompts(lm.config.vocab)
    answers(engine, [Request(p, 12) for p in token_rows])
    before = engine.stats.compilations
    options = [{"temperature": 1.0}, {"top_k": 3, "temperature": 1.0}, {"min_p": 0.1, "temperature": 2.0}, SAMPLED]
    answers(engine, [Request(p, 12, Sampling(**options[i % 4])) for i, p in enumerate(token_rows)])
    assert engine.stats.compilations == before


@pytest.mark.parametrize("family, example", [("llama", "plain"), pytest.param("qwen3_next", "mixed", marks=pytest.mark.slow)])
def test_after_warming_up_no_request_compiles_anything(family: str, example: str):
    lm = lm_of(family, example)
    engine = Engine(lm.module, EngineSettings(slots=5, page=8, context=96, pages=40, budget=64, budget_decoding=32))
    number = engine.warm_up()
    assert number == engine.stats.compilations > 5
    assert engine.pages.used == 0
    chance = np.random.default_rng(0)
    waiting = [
        Request(
            chance.integers(3, lm.config.vocab, chance.integers(1, 60)).tolist(),
            int(chance.integers(1, 20)),
            Sampling(**BIASED[i % len(BIASED)]),
            frozenset([11]),
            row=i,
        )
        for i in range(40)
    ]
    sizes = sampler.write_slot.compilations
    while waiting or engine.busy:
        for _ in range(min(chance.integers(0, 4), len(waiting))):
            engine.add(waiting.pop())
        engine.step()
    assert engine.stats.compilations == number
    assert sampler.write_slot.compilations == sizes
    prompt = prompts(lm.config.vocab)[0]
    whole = lm.logits([[*prompt, *(answer := answers(engine, [Request(prompt, 6)])[0])]])[0].argmax(-1)
    assert answer == whole[len(prompt) - 1 : -1].tolist(), "warming up leaves nothing in the cache"


def test_a_common_beginning_is_computed_once(lm: LM, engine: Engine):
    prompt = prompts(lm.config.vocab, (60,))[0]
    first = answers(engine, [Request(prompt, 6)])
    before = engine.stats.reused_tokens
    second, other = answers(engine, [Request(prompt, 6), Request(prompt, 6, salt="other")])
    assert engine.stats.reused_tokens - before == 59, "all but the last of 60 tokens; nothing under another salt"
    assert [second] == first == [other]


TOGETHER = EngineSettings(slots=9, page=8, context=96, pages=100, budget=64, budget_decoding=32)


def test_pages_that_an_interrupted_step_was_to_compute_are_not_found(lm: LM, monkeypatch: pytest.MonkeyPatch):
    engine, prompt = Engine(lm.module, TOGETHER), prompts(lm.config.vocab, (40,))[0]
    expected = [event.token for event in Engine(lm.module, TOGETHER).generate([Request(prompt, 5)])[0]]

    def interrupted(plan: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_dispatch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([Request(prompt, 5)])
    assert [event.token for event in engine.generate([Request(prompt, 5)])[0]] == expected
    assert engine.stats.reused_tokens == 0


def together(lm: LM, settings: EngineSettings) -> int:
    """Groups of equal prompts that come at once, some longer than a step: checks their answers, and returns the tokens reused."""
    engine, token_rows = Engine(lm.module, settings), prompts(lm.config.vocab, (40, 41, 80))
    outputs = answers(engine, [Request(p, 5) for p in token_rows for _ in range(3)])
    for i, prompt in enumerate(token_rows):
        first, second, third = outputs[3 * i : 3 * i + 3]
        assert first == second == third
        whole = lm.logits([[*prompt, *first]])[0].argmax(-1)
        assert first == whole[len(prompt) - 1 : -1].tolist()
    return engine.stats.reused_tokens


def test_equal_prompts_that_come_at_once_are_computed_once(lm: LM):
    assert together(lm, TOGETHER) == 2 * (39 + 40 + 79), "all but the last token"


def test_an_equal_prompt_is_one_decoding_row_and_its_copy_is_its_own(lm: LM):
    """The page in which a prompt ends is copied: both answers go on in pages of their own, and a third one begins as they did, though
    the first has ended and its answer stands behind the prompt."""
    engine, (prompt, other) = Engine(lm.module, TOGETHER), prompts(lm.config.vocab, (13, 14))
    sampling = Sampling(temperature=1.0)
    alone = [answers(Engine(lm.module, TOGETHER), [Request(prompt, 12, sampling, seed=seed)])[0] for seed in (1, 2, 3)]
    assert alone[0] != alone[1]
    seen: list[tuple[int, list[int]]] = []
    dispatch = engine._dispatch

    def looking(plan: Any) -> Any:
        seen.append((len(plan.copies), [len(chunk.tokens) for chunk in plan.chunks]))
        return dispatch(plan)

    engine._dispatch = looking
    requests = [Request(prompt, 12, sampling, seed=1), Request(prompt, 12, sampling, seed=2), Request(other, 12, sampling)]
    outputs = answers(engine, requests)
    assert seen[:2] == [(0, [13, 14]), (1, [])], "the second waits for the step after the first"
    assert outputs[:2] == alone[:2]
    assert answers(engine, [Request(prompt, 12, sampling, seed=3)])[0] == alone[2]
    assert engine.stats.reused_tokens == 2 * 12
    # A prompt that ends with a page, but for its last token, needs no copy.
    (even,) = prompts(lm.config.vocab, (17,))
    seen.clear()
    first, second = answers(engine, [Request(even, 5, salt="even") for _ in range(2)])
    assert (first == second, sum(copies for copies, _ in seen)) == (True, 0)
    assert engine.stats.reused_tokens == 2 * 12 + 16


def test_equal_prompts_beside_long_ones_compile_nothing(lm: LM):
    """A step with as many prompt tokens as one without decoding rows has none."""
    engine = Engine(lm.module, TOGETHER.model_copy(update={"budget": 96, "budget_decoding": 32}))
    before = engine.warm_up()
    shared_prompt, *others = prompts(lm.config.vocab, (13, 30, 31, 32, 29))
    answers(engine, [Request(shared_prompt, 3)])
    requests = [*others[:2], shared_prompt, *others[2:], shared_prompt]
    outputs = answers(engine, [Request(p, 5) for p in requests])
    for prompt, answer in zip(requests, outputs, strict=True):
        whole = lm.logits([[*prompt, *answer]])[0].argmax(-1)
        assert answer == whole[len(prompt) - 1 : -1].tolist()
    assert engine.stats.compilations == before
    assert engine.stats.reused_tokens == 2 * 12


@pytest.mark.slow
@pytest.mark.parametrize("family, example", [*STRUCTURES, *(case[:2] for case in WINDOWED[1:])])
def test_equal_prompts_that_come_at_once(family: str, example: str):
    lm = lm_of(family, example)
    engine = Engine(lm.module, TOGETHER)
    assert (together(lm, TOGETHER) > 0) == engine.runner.shares


def test_new_weights_count_at_once_for_running_and_for_new_requests():
    lm, other = lm_of("llama", "plain"), random_model(FAMILIES["llama"].examples()["plain"], 1).module
    engine, prompt = Engine(lm.module, TIGHT), prompts(lm.config.vocab)[1]
    number = engine.add(Request(prompt, 20))
    events = [event for _ in range(6) for event in engine.step()]
    tokens = [event.token for event in events if event.token is not None]
    assert 0 < len(tokens) < 10
    put(lm.module, split(other)[1])
    tokens += [event.token for event in engine.run() if event.id == number]
    expected = LM(lm.config, other)
    starts = [m for m in range(3, 10) if tokens[m:] == alone(expected, prompt + tokens[:m], 20 - m)]
    assert starts, "from some token on, the answer is that of the new weights over what was made"
    assert answers(engine, [Request(prompt, 5)])[0] == alone(expected, prompt, 5)


def test_a_preempted_answer_whose_chunks_end_one_token_early_resumes_in_another_slot(lm: LM, engine: Engine):
    (prompt,) = prompts(lm.config.vocab, (60,))
    engine.reset_prefix_cache()
    number, tokens = engine.add(Request(prompt, 12, priority=1)), []
    while len(tokens) < 4:
        tokens += [event.token for event in engine.step()]
    slot = engine._requests[number].scheduled.slot
    engine.reset_prefix_cache(running=True)
    # A step's token was in flight: 65 tokens, two chunks of 32 and one more. The other prompt begins in the slot that it had, and
    # shares no page with it.
    assert len(engine._requests[number].scheduled.tokens) == TIGHT.budget + 1
    engine.add(Request(prompt[1:10], 2))
    tokens += [event.token for event in engine.step() if event.id == number]
    resumed = engine._requests[number].scheduled
    assert (resumed.slot != slot, resumed.reused) == (True, 0)
    tokens += [event.token for event in engine.run() if event.id == number]
    assert tokens == alone(lm, prompt, 12)


@pytest.mark.slow
@pytest.mark.parametrize("family, example", default(STEPPED[0], of=STEPPED))
def test_several_steps_in_one_dispatch_change_no_answer(family: str, example: str):
    """With preemption, an end token within a dispatch, bans that need single steps, and layers with windows or states."""
    lm = lm_of(family, example)
    token_rows = prompts(lm.config.vocab, (5, 9, 6, 3, 12, 7))
    end = alone(lm, token_rows[0], 6)[-1]
    requests = [
        Request(p, 20 + 3 * i, Sampling(**SAMPLED if i % 2 else {}), frozenset([] if i else [end]), seed=3, row=i, top=i % 3)
        for i, p in enumerate(token_rows)
    ]
    requests.append(Request(token_rows[3], 7, Sampling(min_tokens=6), frozenset([end])))
    engines = [Engine(lm.module, TIGHT.model_copy(update={"steps": steps, "pages": 12})) for steps in (1, 4)]
    assert engines[1].warm_up() > 0
    before = engines[1].stats.compilations
    plain, several = (engine.generate(requests) for engine in engines)
    assert engines[1].stats.compilations == before
    assert engines[1].scheduler.is_empty
    assert engines[1].scheduler.preemptions > 0
    for events, other in zip(plain, several, strict=True):
        assert [(e.token, e.finish_reason) for e in events] == [(e.token, e.finish_reason) for e in other]
        assert [e.logprob for e in events] == pytest.approx([e.logprob for e in other], abs=1e-4)
        assert [[token for token, _ in e.top] for e in events] == [[token for token, _ in e.top] for e in other]
    assert plain[0][-1].finish_reason == "stop"


def test_several_steps_are_one_dispatch_until_somebody_needs_each_token(lm: LM, engine: Engine):
    several = Engine(lm.module, TIGHT.model_copy(update={"steps": 4, "pages": 48}))
    (prompt,) = prompts(lm.config.vocab, (5,))

    def events_by_step(request: Request) -> list[int]:
        several.add(request)
        counts = []
        while several.busy:
            counts.append(len(several.step()))
        return [count for count in counts if count]

    assert events_by_step(Request(prompt, 11)) == [1, 4, 4, 2]
    assert answers(several, [Request(prompt, 11)]) == answers(engine, [Request(prompt, 11)])
    assert events_by_step(Request(prompt, 4, Sampling(min_tokens=2), frozenset([1]))) == [1, 1, 1, 1]
    with pytest.raises(ValueError, match="does not go with `speculative`"):
        EngineSettings(steps=2, speculative={"method": "ngram"})


def test_an_answer_is_the_same_in_any_company(lm: LM, engine: Engine):
    token_rows = prompts(lm.config.vocab)
    request = Request(token_rows[1], 10, Sampling(**SAMPLED), seed=5)
    alone = answers(engine, [request])[0]
    others = [Request(p, 9, Sampling(temperature=1.5, top_k=5), seed=i) for i, p in enumerate(token_rows)]
    assert answers(engine, [*others, request])[-1] == alone


def test_abort_ends_a_request_at_once_and_the_others_go_on(lm: LM, engine: Engine):
    token_rows = prompts(lm.config.vocab)
    expected = answers(engine, [Request(token_rows[0], 12)])[0]
    first, running, waiting = (engine.add(Request(token_rows[i], 12)) for i in (0, 1, 2))
    engine.step()
    assert engine.abort(running)
    assert engine.abort(waiting)
    assert not engine.abort(running), "it has ended"
    events = list(engine.run())
    assert [e.token for e in events if e.id == first and e.token is not None] == expected
    assert {(e.id, e.finish_reason) for e in events if e.finish_reason} == {(first, "length"), (running, "abort"), (waiting, "abort")}
    assert engine.pages.free == engine.pages.count


def test_an_answer_ends_at_an_end_token_and_says_why(lm: LM, engine: Engine):
    prompt = prompts(lm.config.vocab)[0]
    plain = answers(engine, [Request(prompt, 12)])[0]
    at = next(i for i, token in enumerate(plain) if token not in plain[:i] and i >= 2)
    number = engine.add(Request(prompt, 12, stop_tokens=frozenset([plain[at]])))
    events = [e for e in engine.run() if e.id == number]
    assert [e.token for e in events] == plain[: at + 1]
    assert events[-1].finish_reason == "stop"


def test_log_probabilities_are_the_models_own(lm: LM, engine: Engine):
    prompt = prompts(lm.config.vocab)[0]
    engine.add(Request(prompt, 5, Sampling(temperature=1.3, top_k=2)))
    events = list(engine.run())
    tokens = [e.token for e in events]
    log_probs = jax.nn.log_softmax(lm.logits([[*prompt, *tokens]])[0].astype(np.float64))
    expected = [float(log_probs[len(prompt) + i - 1, token]) for i, token in enumerate(tokens)]
    np.testing.assert_allclose([e.logprob for e in events], expected, atol=1e-4)


@pytest.mark.slow
def test_one_program_and_programs_by_layer_give_the_same(lm: LM, engine: Engine, monkeypatch: pytest.MonkeyPatch):
    """One program is for accelerators; both layouts of weights."""
    token_rows = prompts(lm.config.vocab, (5, 40, 17))
    expected = answers(engine, [Request(p, 8) for p in token_rows])
    stacked = lm.config.build(Scan())
    put(stacked, from_layers(stacked, split(lm.module)[1]))
    assert isinstance(engine.runner.forward, ByLayer)
    assert answers(Engine(stacked, TIGHT), [Request(p, 8) for p in token_rows]) == expected
    monkeypatch.setattr(runner_module, "forward_of", lambda *parts, **options: forward_of(*parts, **{**options, "whole": True}))
    for model in (lm.module, stacked):
        whole = Engine(model, TIGHT)
        assert isinstance(whole.runner.forward, OneProgram)
        assert answers(whole, [Request(p, 8) for p in token_rows]) == expected


BIASED = [
    {"logit_bias": {7: 100.0}},
    {"logit_bias": {7: -100.0}, "temperature": 1.0},
    {"allowed_tokens": (3, 5, 9), "temperature": 2.0},
    {"bad_words": ((4,), (8, 9), (5, 9, 3)), "allowed_tokens": (3, 4, 5, 8, 9), "temperature": 3.0},
    {"min_tokens": 6, "allowed_tokens": (3, 5), "temperature": 1.0},
    {},
]


def test_what_a_request_bans_allows_and_forces_in_one_batch(lm: LM, engine: Engine):
    token_rows, ends = prompts(lm.config.vocab, (5, 9, 6, 3, 12, 7)), frozenset([11, 12])
    for seed in range(3):
        outputs = answers(
            engine, [Request(p, 20, Sampling(**bias), ends, seed, i) for i, (p, bias) in enumerate(zip(token_rows, BIASED))]
        )
        forced, banned, allowed, worded, least, plain = outputs
        assert set(forced) == {7}
        assert 7 not in banned
        assert set(allowed) <= {3, 5, 9, 11, 12}
        text = ",".join(map(str, ["", *worded, ""]))
        assert set(worded) <= {3, 5, 8, 9, 11, 12}
        assert ",8,9," not in text
        assert ",5,9,3," not in text
        assert not {11, 12} & set(least[:6])
        assert len(least) >= 6
        full = alone(lm, token_rows[5], 20)
        cut = next((i + 1 for i, token in enumerate(full) if token in ends), 20)
        assert plain == full[:cut], "the biases of others change nothing"


@pytest.mark.slow
def test_a_bias_survives_preemption_and_leaves_with_its_owner(lm: LM, engine: Engine):
    token_rows = prompts(lm.config.vocab, (5, 9, 6, 3, 12, 7))
    before = engine.scheduler.preemptions
    outputs = answers(
        engine, [Request(p, 28, Sampling(allowed_tokens=(3, 5), temperature=1.0), row=i) for i, p in enumerate(token_rows)]
    )
    assert engine.scheduler.preemptions > before
    assert {token for answer in outputs for token in answer} == {3, 5}
    assert answers(engine, [Request(token_rows[0], 12)])[0] == alone(lm, token_rows[0], 12)


def test_a_bad_word_is_banned_by_the_tokens_before_it_whatever_was_likeliest(lm: LM, engine: Engine):
    """Greedy: up to the ban the answer is the free one, then it departs."""
    prompt = prompts(lm.config.vocab)[1]
    free = alone(lm, prompt, 12)
    at = next(i for i in range(3, 12) if (free[i - 1], free[i]) not in list(pairwise(free))[: i - 1])
    outputs = answers(engine, [Request(prompt, 12, Sampling(bad_words=((free[at - 1], free[at]),)))])[0]
    assert outputs[:at] == free[:at]
    assert outputs[at] != free[at]


def test_callers_share_an_engine(lm: LM, engine: Engine):
    token_rows = prompts(lm.config.vocab)
    first, second = (engine.add(Request(p, 9)) for p in token_rows[:2])
    tokens_of: dict[int, list[int]] = {first: [], second: []}
    while any(len(tokens) < 9 for tokens in tokens_of.values()):
        for number in (second, first):
            if len(tokens_of[number]) < 9:
                tokens_of[number] += [event.token for event in engine.collect([number])]
    assert [tokens_of[first], tokens_of[second]] == [alone(lm, p, 9) for p in token_rows[:2]]
    with pytest.raises(RuntimeError, match="have ended"):
        engine.collect([first])
    with pytest.raises(BadInput, match="empty"):
        engine.generate([Request(token_rows[0], 3), Request([], 3)])
    assert not engine._requests


def test_bad_requests_are_refused_before_they_wait(engine: Engine):
    for tokens, most, match in [
        ([], 1, "empty"),
        ([-1], 1, "outside"),
        ([10**6], 1, "outside"),
        ([1] * 96, 1, "room"),
        ([1], 0, "max_tokens"),
    ]:
        with pytest.raises(BadInput, match=match):
            engine.add(Request(tokens, most))
    assert not engine.busy
    for options, ends, match in [
        ({"logit_bias": {10**6: 1.0}}, (), "outside"),
        ({"allowed_tokens": ()}, (), "allows no token"),
        ({"allowed_tokens": (3,), "bad_words": ((3,),)}, (), "allows no token"),
        ({"allowed_tokens": (), "min_tokens": 1}, (2,), "allows no token"),
        ({"bad_words": ((),)}, (), "empty sequence"),
    ]:
        with pytest.raises(BadInput, match=match):
            engine.add(Request([1], 1, Sampling(**options), frozenset(ends)))
    with pytest.raises(BadInput, match="top = 21"):
        engine.add(Request([1], 1, top=21))
    assert not engine.busy
    with pytest.raises(BadInput, match="holds no sequence"):
        Engine(engine.model, EngineSettings(context=96, page=8, pages=3))


def test_the_cache_takes_a_share_of_the_memory_that_is_free(lm: LM, monkeypatch: pytest.MonkeyPatch):
    settings = EngineSettings(slots=8, page=8, context=64)
    page_size = bytes_of_caches(jax.eval_shape(lambda: empty_pools(lm.module.layers.holds(), 0, 1, 8, lm.module.dtype, longest=64)))
    for free, pages in ((4 * 20 * page_size, 20), (0, 8), (None, 64)):
        monkeypatch.setattr(cache, "memory_bytes", lambda free=free: (None, free))
        assert Engine(lm.module, settings).pages.count == pages
    device = Mock(platform="gpu", memory_stats=lambda: {"bytes_limit": 1000.0, "bytes_in_use": 200.0})
    monkeypatch.setattr(cache.jax, "Array", SimpleNamespace)
    assert cache.room_for_cache({"w": SimpleNamespace(devices=lambda: {device})}) == 640


def test_the_steps_of_a_server_do_not_look_at_each_weight(lm: LM, monkeypatch: pytest.MonkeyPatch):
    """Nobody else writes them while it is busy; between two requests anybody may."""
    engine = Engine(lm.module, EngineSettings(slots=2, context=64, pages=16, page=8), exclusive=True)
    looks: list[str] = []

    class Watched:
        def __init__(self, address: str, inner: Any):
            self.address, self.inner = address, inner

        def get_raw_value(self) -> Any:
            looks.append(self.address)
            return self.inner.get_raw_value()

        def get_value(self) -> Any:
            return self.inner.get_value()

    monkeypatch.setattr(engine.runner, "variables", {address: Watched(address, v) for address, v in engine.runner.variables.items()})
    counts = []
    for most in (2, 30):
        engine.add(Request([1, 2, 3], most))
        list(engine.run())
        counts.append(len(looks))
        looks.clear()
    assert counts[1] <= counts[0], "a number for each request, not for each step"
    engine.add(Request([1, 2, 3], 30))
    engine.step()
    looks.clear()
    engine.swap_weights({})
    engine.step()
    assert set(looks) == set(engine.runner.variables)


def test_what_gpus_run_fastest_is_chosen_there(lm: LM, monkeypatch: pytest.MonkeyPatch):
    """Layers that are not scanned, and four decoding rows at least (docs/guides/gpus.md). The answers are the same."""
    assert isinstance(default_run(lm.config), Unroll)
    assert isinstance(default_run(lm.config.model_copy(update={"layers": 33})), Scan)
    prompt, settings = prompts(lm.config.vocab)[0], EngineSettings(slots=8, context=32, page=4)
    builder = BatchBuilder(settings, PageTables(4, 8), shares=False, width=16)
    assert [builder.decode_sizes(n).decodes for n in (1, 2, 3, 5)] == [1, 4, 4, 8]
    monkeypatch.setattr(batch, "platform", lambda: "gpu")
    assert [builder.decode_sizes(n).decodes for n in (1, 2, 3, 5)] == [4, 4, 4, 8]
    engine = Engine(lm.module, settings)
    assert answers(engine, [Request(prompt, 6)]) == [alone(lm, prompt, 6)]
    monkeypatch.setattr(build.jax, "default_backend", lambda: "gpu")
    assert isinstance(default_run(lm.config.model_copy(update={"layers": 33})), Unroll)


def test_what_tpus_run_fastest_is_chosen_there(lm: LM, monkeypatch: pytest.MonkeyPatch):
    """Layers in a loop, unless they have experts; and four decoding rows at least."""
    assert isinstance(default_run(lm.config, "tpu"), Scan)
    assert isinstance(default_run(next(iter(MixtralConfig.examples().values())), "tpu"), Unroll)
    builder = BatchBuilder(EngineSettings(slots=8, context=32, page=4), PageTables(4, 8), shares=False, width=16)
    monkeypatch.setattr(batch, "platform", lambda: "tpu")
    assert [builder.decode_sizes(n).decodes for n in (1, 2, 3, 5)] == [4, 4, 4, 8]


def test_pools_with_filled_heads_answer_the_same(lm: LM, monkeypatch: pytest.MonkeyPatch):
    """On TPUs keys and values share pools whose heads are as long as a row of a tile."""
    prompt, settings = prompts(lm.config.vocab)[0], EngineSettings(slots=2, context=32, page=4)
    sizes = []

    def filled(heads: int, size: int, dtype: Any) -> int:
        sizes.append(size)
        return size + 3

    monkeypatch.setattr(layer_cache, "joined_size", filled)
    engine = Engine(lm.module, settings)
    pools = [a for cache in engine.runner.caches.values() for name, a in cache.items() if name.endswith("kv")]
    assert {a.shape[-1] for a in pools} == {sizes[0] + 3}
    assert answers(engine, [Request(prompt, 6)]) == [alone(lm, prompt, 6)]
