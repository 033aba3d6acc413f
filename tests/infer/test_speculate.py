"""Speculative decoding: answers, log-probabilities and ends are those of the engine without it, whatever is drafted."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import default

import argosy
from argosy.cli import main
from argosy.cli.verbs.generate import is_setting
from argosy.core.errors import BadInput, SettingsError
from argosy.core.settings import read_settings, words_layer
from argosy.data.tokenizers.byte import ByteTokenizer
from argosy.infer import settings as how
from argosy.infer.engine import runner as runner_module
from argosy.infer.engine.engine import Engine
from argosy.infer.engine.request import Event, Request
from argosy.infer.engine.scheduled import ScheduledRequest
from argosy.infer.forward.passes import OneProgram, forward_of
from argosy.infer.lm import LM
from argosy.infer.sampling.sample import Sampling
from argosy.infer.settings import EngineSettings
from argosy.infer.speculation.drafts import Drafter, NGramDrafter, last_occurrence
from argosy.models import FAMILIES
from argosy.models.parts.attention.attend import Packed
from argosy.models.parts.stack import Scan
from argosy.models.parts.stack.addresses import from_layers
from argosy.models.parts.weight import merge, put, split
from argosy.weights.build import random_model

# 13 pages of 8 tokens hold no four answers of 28 tokens.
TIGHT = EngineSettings(slots=4, page=8, context=96, pages=13, budget=64, budget_decoding=32)
# At 0.9 the sum of the likeliest tokens once came within 2e-7 of it: rounding then decided which tokens are left. Here 3e-5 is nearest.
SAMPLED = {"temperature": 0.8, "top_p": 0.85, "repetition_penalty": 1.2, "frequency_penalty": 0.3}
MANNERS = [{}, SAMPLED, {"temperature": 1.0}, {"temperature": 1.0, "logit_bias": {7: 3.0}, "presence_penalty": 0.5}]


def lm_of(family: str, example: str, **changes: Any) -> LM:
    config = FAMILIES[family].examples()[example].model_copy(update=changes)
    return LM(config, random_model(config, 0).module)


@pytest.fixture(scope="module")
def lm() -> LM:
    byte_lm = lm_of("llama", "plain", vocab=ByteTokenizer.vocab)
    byte_lm.tokenizer = ByteTokenizer()
    return byte_lm


@pytest.fixture(scope="module")
def plain(lm: LM) -> Engine:
    return Engine(lm.module, TIGHT)


@pytest.fixture(scope="module")
def speculative(lm: LM) -> Engine:
    """Its drafter is another one in most tests."""
    return Engine(lm.module, with_(how.NGram(tokens=4)))


def with_(speculative: Any, **changes: Any) -> EngineSettings:
    return TIGHT.model_copy(update={"speculative": speculative, **changes})


def make_requests(vocab: int, most: int = 28, lengths: tuple[int, ...] = (5, 50, 6, 3, 12, 7)) -> list[Request]:
    """Requests of every manner, some with log-probabilities; prompts longer than a chunk, and equal beginnings."""
    rng = np.random.default_rng(0)
    begin = rng.integers(0, vocab, 60).tolist()
    return [
        Request([*begin[: n - 2], n, 4], most, Sampling(**MANNERS[i % 4]), seed=3, row=i, top=i % 3) for i, n in enumerate(lengths)
    ]


class Script(Drafter):
    """Drafts the answers of another engine, with errors at random places."""

    def __init__(self, engine: Engine, tokens: int, requests: list[Request], expected: list[list[Event]], errors: float):
        self.engine = engine
        self.tokens, self.errors, self.chance = tokens, errors, np.random.default_rng(0)
        self.vocab = 1 + max(token for events in expected for e in events if (token := e.token) is not None)
        self.texts = [(r.tokens, [e.token for e in events if e.token is not None]) for r, events in zip(requests, expected)]

    def draft(self, plan: Any, slots: Any) -> list[list[int]]:
        rows = [self.engine._requests[s.id].request.row for s in plan.decodes]
        return [self._draft(s.tokens, s.prompt, row, room) for s, row, room in zip(plan.decodes, rows, plan.draft_room)]

    def _draft(self, tokens: list[int], prompt: int, row: int, room: int) -> list[int]:
        text = next(answer for ids, answer in self.texts[row:] if ids == tokens[:prompt])
        right = text[len(tokens) - prompt :][:room]
        return [(token + int(self.chance.random() < self.errors)) % self.vocab for token in right]


def install_script(engine: Engine, requests: list[Request], expected: list[list[Event]], errors: float = 0.3) -> None:
    assert engine.speculation is not None
    engine.speculation.drafter = Script(engine, 4, requests, expected, errors)


def assert_same(outputs: list[list[Event]], expected: list[list[Event]]) -> None:
    for mine, other in zip(outputs, expected, strict=True):
        assert [(e.token, e.finish_reason) for e in mine] == [(e.token, e.finish_reason) for e in other]
        for part in ("logprob", "drawn"):
            np.testing.assert_allclose([getattr(e, part) for e in mine], [getattr(e, part) for e in other], atol=1e-4)
        assert [[token for token, _ in e.top] for e in mine] == [[token for token, _ in e.top] for e in other]
        for a, b in zip(mine, other, strict=True):
            np.testing.assert_allclose([p for _, p in a.top], [p for _, p in b.top], atol=1e-4)


def accepted_count(engine: Engine) -> int:
    assert engine.speculation is not None
    return sum(engine.speculation.accepted)


@pytest.mark.slow
def test_answers_are_those_without_speculation_though_pages_run_out(lm: LM, plain: Engine, speculative: Engine):
    requests = make_requests(lm.config.vocab)
    expected = plain.generate(requests)
    for errors in (0.0, 0.3, 1.0):
        install_script(speculative, requests, expected, errors)
        before = accepted_count(speculative), speculative.stats.steps, speculative.scheduler.preemptions
        assert_same(speculative.generate(requests), expected)
        steps = speculative.stats.steps - before[1]
        assert speculative.scheduler.preemptions > before[2]
        assert (accepted_count(speculative) > before[0]) == (errors < 1)
        assert steps < 0.5 * plain.stats.steps if not errors else True
        assert speculative.pages.free == speculative.pages.count
    for request, events in zip(requests, expected, strict=True):
        install_script(speculative, requests, expected)
        assert_same(speculative.generate([request]), [events])


STRUCTURES = [
    pytest.param("qwen3_next", "mixed", {"layers": 2, "dense": (0,)}, id="recurrent"),
    pytest.param("qwen3_next", "plain", {}, id="recurrent-experts", marks=pytest.mark.slow),
    pytest.param("gemma", "3", {}, id="windowed", marks=pytest.mark.slow),
    pytest.param("gpt_oss", "plain", {}, id="sinks", marks=pytest.mark.slow),
    pytest.param("llama4", "interleaved", {}, id="chunked", marks=pytest.mark.slow),
    pytest.param("deepseek", "2-lite", {}, id="latent", marks=pytest.mark.slow),
    pytest.param("deepseek", "3.2", {}, id="sparse", marks=pytest.mark.slow),
    pytest.param("mixtral", "plain", {}, id="experts", marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize("family, example, changes", STRUCTURES)
def test_every_structure_verifies_and_rolls_back(family: str, example: str, changes: dict[str, Any]):
    lm = lm_of(family, example, **changes)
    requests = make_requests(lm.config.vocab, 16, (5, 30, 6, 9))
    expected = Engine(lm.module, TIGHT).generate(requests)
    engine = Engine(lm.module, with_(how.NGram(tokens=4)))
    install_script(engine, requests, expected)
    assert_same(engine.generate(requests), expected)
    assert 0 < accepted_count(engine) < engine.speculation.drafted


def test_n_grams_are_accepted_where_a_text_repeats(lm: LM, plain: Engine, speculative: Engine):
    """The greedy answers of this model fall into loops."""
    speculative.speculation.drafter = NGramDrafter(how.NGram(tokens=4, lookup_min=1))
    requests = make_requests(lm.config.vocab)
    before = accepted_count(speculative)
    assert_same(speculative.generate(requests), plain.generate(requests))
    assert accepted_count(speculative) > before


@pytest.mark.parametrize(
    "text, least, most, place",
    [
        ([1, 2, 3, 9, 1, 2], 2, 5, 2),
        ([1, 2, 3, 1, 2, 4, 1, 2], 2, 5, 5),
        ([7, 1, 2, 3, 5, 1, 2, 4, 7, 1, 2], 2, 5, 3),
        ([7, 1, 2, 3, 5, 1, 2, 4, 7, 1, 2], 1, 2, 7),
        ([1, 2, 3, 4, 2], 2, 5, None),
        ([1, 2, 3, 4, 2], 1, 5, 2),
        ([1, 1, 1], 2, 2, 2),
        ([1], 1, 5, None),
        ([1, 2, 3], 1, 5, None),
    ],
    ids=["follows", "latest", "longest", "no longer than asked", "too short", "short enough", "overlap", "one token", "nothing"],
)
def test_an_n_gram_is_looked_up_where_it_occurred_last(text: list[int], least: int, most: int, place: int | None):
    assert last_occurrence(np.asarray(text), least, most) == place


def test_drafts_of_a_text_with_a_short_period_go_on_with_it():
    drafter = NGramDrafter(how.NGram(tokens=7, lookup_min=2))
    sequence = ScheduledRequest([9, 1, 2, 3, 1, 2, 3], 9)
    assert drafter._draft(sequence, 7) == [1, 2, 3, 1, 2, 3, 1]
    sequence.tokens += [*range(20, 600), 1, 2]
    assert drafter._draft(sequence, 3) == [3, 20, 21]
    assert drafter._draft(sequence, 0) == []


@pytest.mark.slow
def test_a_draft_model_that_is_the_model_is_always_right(lm: LM, plain: Engine):
    """At any temperature and under penalties, because it draws with the keys and the state of the token that it guesses."""
    engine = Engine(lm.module, with_(how.DraftModel(model="itself", tokens=3)), draft=lm.module)
    requests = make_requests(lm.config.vocab)
    expected = plain.generate(requests)
    assert_same(engine.generate(requests), expected)
    assert accepted_count(engine) == engine.speculation.drafted > 60
    again = engine.stats.reused_tokens
    assert_same(engine.generate(requests[1:2]), expected[1:2])
    assert engine.stats.reused_tokens > again, "of a prompt found in the prefix cache too"
    assert accepted_count(engine) == engine.speculation.drafted


@pytest.mark.slow
def test_a_draft_model_that_is_another_model_changes_nothing(lm: LM, plain: Engine):
    engine = Engine(lm.module, with_(how.DraftModel(model="other", tokens=3)), draft=random_model(lm.config, 1).module)
    requests = make_requests(lm.config.vocab)
    assert_same(engine.generate(requests), plain.generate(requests))
    assert 0 < accepted_count(engine) < engine.speculation.drafted


def with_mtp() -> LM:
    return lm_of("deepseek", "3", layers=2, dense=1)


@pytest.mark.slow
def test_the_module_for_multi_token_prediction_drafts_what_it_predicts():
    """Against the module over the whole sequence; the second draft reads the module's own output."""
    lm = with_mtp()
    model, requests = lm.module, make_requests(lm.config.vocab, 16, (5, 40, 6, 9))
    engine = Engine(model, with_(how.MTP(tokens=2)))
    seen: list[tuple[list[int], list[int]]] = []
    inner = engine.speculation.drafter.draft

    def draft(plan: Any, slots: Any) -> list[list[int]]:
        drafts = inner(plan, slots)
        greedy = [not engine._requests[s.id].request.sampling.model_fields_set for s in plan.decodes]
        seen.extend(([*s.tokens], draft) for s, draft, plain in zip(plan.decodes, drafts, greedy) if draft and plain)
        return drafts

    engine.speculation.drafter.draft = draft
    expected = Engine(model, TIGHT).generate(requests)
    assert_same(engine.generate(requests), expected)
    assert len(seen) > 10
    graph, weights = split(model)
    whole = jnp.ones((1, TIGHT.context), jnp.int32)

    @jax.jit
    def two(ids: Any, count: Any) -> tuple[Any, Any]:
        model = merge(graph, weights)
        x, following = model.hidden(ids, Packed(whole))[0], jnp.roll(ids, -1, 1)
        y = model.ahead(1, x, following, Packed(whole))[0]
        token = jnp.argmax(model.unembed(y)[0, count - 2])
        x, following = x.at[0, count - 1].set(y[0, count - 2]), following.at[0, count - 1].set(token)
        return token, jnp.argmax(model.unembed(model.ahead(1, x, following, Packed(whole))[0])[0, count - 1])

    for tokens, drafts in seen:
        ids = np.zeros((1, TIGHT.context), np.int32)
        ids[0, : len(tokens)] = tokens
        assert drafts == [int(token) for token in two(ids, len(tokens))][: len(drafts)]
    assert any(len(drafts) == 2 for _, drafts in seen)


@pytest.mark.slow
def test_a_module_that_predicts_as_the_model_does_is_always_right():
    """Layers that add nothing leave a model whose next token follows from the last one alone, and a module can copy that."""
    lm = with_mtp()
    weights = split(lm.module)[1]
    silent = {name: jnp.zeros_like(a) for name, a in weights.items() if name.endswith((".o.w", ".o.b", ".down.w"))}
    D = lm.config.width
    silent["mtp.0.proj.w"] = jnp.concatenate([jnp.eye(D), jnp.zeros((D, D))]).astype(lm.module.dtype)
    put(lm.module, silent)
    engine, requests = Engine(lm.module, with_(how.MTP(tokens=3))), make_requests(lm.config.vocab, 16, (5, 40, 6, 9))
    assert_same(engine.generate(requests), Engine(lm.module, TIGHT).generate(requests))
    assert accepted_count(engine) == engine.speculation.drafted > 20


@pytest.mark.slow
def test_followers_of_a_request_that_left_before_the_module_computed_its_pages():
    """They found its pages in the step that computed them; what the module keeps for these is then whatever was in memory."""
    lm = with_mtp()
    prompt = np.random.default_rng(0).integers(0, lm.config.vocab, 40).tolist()
    expected = [event.token for event in Engine(lm.module, TIGHT).generate([Request(prompt, 8)])[0]]
    engine = Engine(lm.module, with_(how.MTP(tokens=2)))
    drafter = engine.speculation.drafter
    drafter.caches = jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), drafter.caches)
    first, *others = [engine.add(Request(prompt, 8)) for _ in range(3)]
    events = engine.step()
    assert engine.abort(first)
    events += list(engine.run())
    for number in others:
        assert [event.token for event in events if event.id == number] == expected


def test_what_depends_on_the_answer_is_not_drafted_and_decodes_beside(lm: LM, plain: Engine, speculative: Engine):
    requests = make_requests(lm.config.vocab)
    for i, sampling in ((0, {"bad_words": ((8, 9), (5, 9, 3)), "temperature": 3.0}), (1, {"min_tokens": 9, "temperature": 1.0})):
        requests[i].sampling, requests[i].stop_tokens = Sampling(**sampling), frozenset([11, 12, 13])
    requests[2].grammar = lm.grammar({"regex": "[a-f]{4,20}"})
    expected = plain.generate(requests)
    install_script(speculative, requests, expected, 0.0)
    drafted: dict[int, int] = {}
    inner = speculative.speculation.drafter.draft

    def draft(plan: Any, slots: Any) -> list[list[int]]:
        for sequence, room in zip(plan.decodes, plan.draft_room, strict=True):
            row = speculative._requests[sequence.id].request.row
            drafted[row] = drafted.get(row, 0) + room
        return inner(plan, slots)

    speculative.speculation.drafter.draft = draft
    assert_same(speculative.generate(requests), expected)
    assert {row for row, room in drafted.items() if not room} == {0, 1, 2}
    assert set(drafted) == set(range(6))


def test_an_answer_that_ends_among_its_drafts_ends_there(lm: LM, plain: Engine, speculative: Engine):
    requests = make_requests(lm.config.vocab)
    free = plain.generate(requests)
    install_script(speculative, requests, free, 0.0)
    for request, events in zip(requests, free, strict=True):
        tokens = [e.token for e in events]
        end = next(i for i in range(7, 28) if tokens[i] not in tokens[:i])
        request.stop_tokens = frozenset([tokens[end]])
        tokens_before = speculative.stats.drawn_tokens
        answer_events = speculative.generate([request])[0]
        assert [e.token for e in answer_events] == tokens[: end + 1]
        assert [e.finish_reason for e in answer_events] == [None] * end + ["stop"]
        assert speculative.stats.drawn_tokens - tokens_before == end + 1
        assert speculative.pages.free == speculative.pages.count


def test_aborts_and_new_requests_between_steps_change_no_other_answer(lm: LM, plain: Engine, speculative: Engine):
    requests = make_requests(lm.config.vocab)
    expected = plain.generate(requests)
    install_script(speculative, requests, expected)
    numbers = [speculative.add(request) for request in requests[:4]]
    events = [*speculative.step(), *speculative.step(), *speculative.step()]
    assert speculative.abort(numbers[1])
    numbers += [speculative.add(request) for request in requests[4:]]
    events += [*speculative.run()]
    events_of = [[e for e in events if e.id == number] for number in numbers]
    assert events_of[1][-1].finish_reason == "abort"
    assert_same([events_of[i] for i in (0, 2, 3, 4, 5)], [expected[i] for i in (0, 2, 3, 4, 5)])
    assert speculative.pages.free == speculative.pages.count


def test_pages_with_rejected_drafts_are_not_found_by_others(lm: LM, plain: Engine):
    """The second prompt is the first with its answer: its pages are those that drafts were written into."""
    engine = Engine(lm.module, with_(how.NGram(tokens=4)))
    first = make_requests(lm.config.vocab, 40, (12,))
    expected = plain.generate(first)
    install_script(engine, first, expected, 0.6)
    engine.generate(first)
    second = [Request([*first[0].tokens, *(e.token for e in expected[0][:38])], 12)]
    install_script(engine, second, plain.generate(second), 0.6)
    before = engine.stats.reused_tokens
    assert_same(engine.generate(second), plain.generate(second))
    assert engine.stats.reused_tokens - before == 48
    assert accepted_count(engine) < engine.speculation.drafted


@pytest.mark.slow
def test_new_weights_are_used_from_the_next_token_on():
    lm = lm_of("llama", "plain")
    other = random_model(lm.config, 1).module
    engine = Engine(lm.module, with_(how.DraftModel(model="itself", tokens=3)), draft=lm.module)
    request = make_requests(lm.config.vocab, 28, (12,))[0]
    number = engine.add(request)
    events = [event for _ in range(3) for event in engine.step()]
    tokens = [event.token for event in events]
    put(lm.module, split(other)[1])
    tokens += [event.token for event in engine.run() if event.id == number]
    rest = Request([*request.tokens, *tokens[: len(events)]], 28 - len(events))
    assert tokens[len(events) :] == [e.token for e in Engine(other, TIGHT).generate([rest])[0]]


METHODS = [
    pytest.param("llama", "plain", {}, how.NGram(tokens=3, lookup_min=1), marks=pytest.mark.slow),
    ("llama", "plain", {}, how.DraftModel(model="itself", tokens=3)),
    pytest.param("deepseek", "3", {"layers": 2, "dense": 1}, how.MTP(tokens=2), marks=pytest.mark.slow),
    pytest.param("qwen3_next", "mixed", {}, how.NGram(tokens=3, lookup_min=1), marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize("family, example, changes, method", METHODS)
def test_after_warming_up_no_request_compiles_anything(family: str, example: str, changes: dict[str, Any], method: Any):
    lm = lm_of(family, example, **changes)
    draft = lm.module if isinstance(method, how.DraftModel) else None
    engine = Engine(lm.module, with_(method, slots=3, budget_decoding=32, budget=32, pages=24), draft=draft)
    number = engine.warm_up()
    assert number == engine.stats.compilations > 5
    chance = np.random.default_rng(0)
    waiting = make_requests(lm.config.vocab, 12, tuple(chance.integers(3, 60, 20).tolist()))
    while waiting or engine.busy:
        for _ in range(min(int(chance.integers(0, 3)), len(waiting))):
            engine.add(waiting.pop())
        engine.step()
    assert engine.speculation.drafted
    assert engine.stats.compilations == number
    assert engine.pages.used == 0


def test_without_speculation_there_are_no_programs_for_drafts(plain: Engine):
    assert plain.speculation is None
    assert not any(step.sizes.drafted or step.drafts is not None for step in plain.runner.batches.all_batches())
    assert not any({"verify", "draft", "copies"} & {*size} for size in plain.runner._sizes)


def answers_of(lm: LM, **sampling: Any) -> list[tuple[Any, ...]]:
    answers = lm.generate([[7, 8, 9] * 5, [5, 9, 100]], 24, seed=3, ignore_eos=True, **sampling)
    return [(answer.tokens, answer.text, answer.finish_reason) for answer in answers]


@pytest.fixture(scope="module")
def folder(lm: LM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("speculate")
    lm.save(root / "model", format="argosy")
    return root / "model"


@pytest.mark.parametrize("method", default("ngram", of=["ngram", "draft_model"]))
def test_the_handle_answers_as_without_speculation(lm: LM, folder: Path, method: str):
    more: dict[str, Any] = {"ngram": {"lookup_min": 1}, "draft_model": {"model": str(folder)}}[method]
    settings: Any = TIGHT.model_dump(exclude_unset=True)
    other = argosy.load(folder, engine={**settings, "speculative": {"method": method, "tokens": 4, **more}})
    plain = LM(lm.config, lm.module, lm.tokenizer, engine_settings=TIGHT)
    for sampling in ({}, SAMPLED):
        assert answers_of(other, **sampling) == answers_of(plain, **sampling)
    pieces = other.pieces([[7, 8, 9] * 5], 24, seed=3, ignore_eos=True)
    assert len(list(pieces)) == 24
    assert pieces.completions[0].tokens == answers_of(plain)[0][0]
    engine = other._held._engine
    assert engine is not None
    assert engine.speculation.drafted
    assert (accepted_count(engine) == engine.speculation.drafted) == (method == "draft_model")


@pytest.mark.slow
def test_the_command_generates_as_without_speculation(
    lm: LM, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    drafts, draft = [], NGramDrafter._draft
    monkeypatch.setattr(NGramDrafter, "_draft", lambda *arguments: drafts.append(draft(*arguments)) or drafts[-1])
    words = ["aaaa bbbb aaaa bbbb aaaa", "max_tokens=12", "ignore_eos=true", "engine.slots=4", "engine.page=8"]
    more = ["engine.pages=13", "engine.context=96", "engine.speculative=ngram", "engine.speculative.lookup_min=1"]
    assert main(["generate", str(folder), *words, *more, "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)
    plain = LM(lm.config, lm.module, lm.tokenizer, engine_settings=TIGHT)
    assert answer["tokens"] == plain.generate([words[0]], 12, ignore_eos=True)[0].tokens
    assert any(drafts)


WORDS = [("engine.speculative.lookup_min=1", True), ("engine.slot=3", True), ("engine.a b=3", False), ("engines of war=3", False)]


@pytest.mark.parametrize("word, is_one", WORDS)
def test_the_command_tells_engine_settings_from_a_prompt(word: str, is_one: bool):
    assert is_setting(word) == is_one


@pytest.mark.slow
def test_the_handle_drafts_with_the_module_for_multi_token_prediction():
    plain = with_mtp()
    other = LM(plain.config, plain.module, engine_settings=with_(how.MTP(tokens=2)))
    assert answers_of(other) == answers_of(plain)
    assert other._held._engine.speculation.drafted


def test_the_handle_refuses_a_draft_model_of_another_tokenizer(lm: LM):
    class Other(ByteTokenizer):
        def encode(self, text: str, special: bool = False) -> list[int]:
            return [*super().encode(text, special), 1]

    with pytest.raises(BadInput, match="the draft model has another tokenizer"):
        LM(lm.config, lm.module, lm.tokenizer, draft=LM(lm.config, lm.module, Other()))


def test_what_cannot_draft_is_refused(lm: LM):
    method = with_(how.DraftModel(model="x"))
    for family, example, changes, match in [
        ("llama", "plain", {"vocab": 64}, "64 tokens, the model"),
        ("llama", "plain", {"context": 32, "vocab": lm.config.vocab}, "context of 32 tokens is shorter than 96"),
        ("bert", "plain", {}, "encoder"),
        ("qwen3_next", "mixed", {"layers": 2, "dense": (0,), "vocab": lm.config.vocab}, "recurrent"),
    ]:
        with pytest.raises(BadInput, match=match):
            Engine(lm.module, method, draft=lm_of(family, example, **changes).module)
    with pytest.raises(BadInput, match="no module for multi-token prediction"):
        Engine(lm.module, with_(how.MTP()))
    for words, match in [
        (["speculative=ngram", "speculative.lookup_min=6"], "above lookup_max"),
        (["speculative=draft_model"], "speculative.model"),
        (["speculative=mtp", "speculative.lookup_min=6"], "belongs to"),
        (["speculative=ngrm"], "did you mean `ngram`"),
    ]:
        with pytest.raises(SettingsError, match=match):
            read_settings(EngineSettings, words_layer(words))


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, example, method", [("qwen3_next", "mixed", how.NGram(tokens=4)), ("deepseek", "3", how.MTP(tokens=2))]
)
def test_one_program_over_stacked_layers_speculates_too(
    family: str, example: str, method: Any, monkeypatch: pytest.MonkeyPatch
):
    """As on accelerators."""
    lm = lm_of(family, example)
    requests = make_requests(lm.config.vocab, 16, (5, 30, 6, 9))
    expected = Engine(lm.module, TIGHT).generate(requests)
    stacked = lm.config.build(Scan())
    put(stacked, from_layers(stacked, split(lm.module)[1]))

    monkeypatch.setattr(runner_module, "forward_of", lambda *parts, **options: forward_of(*parts, **{**options, "whole": True}))
    engine = Engine(stacked, with_(method))
    assert isinstance(engine.runner.forward, OneProgram)
    if isinstance(method, how.NGram):
        install_script(engine, requests, expected)
    assert_same(engine.generate(requests), expected)
    assert engine.speculation.drafted > 10
