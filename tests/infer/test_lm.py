"""Generation against the slow and obvious way: the whole sequence again for every token."""

import time
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import default, relative, shared
from laws.families import CASES, noisy_model

import argosy
from argosy.adapt.lora import LoRA
from argosy.adapt.quant import int8
from argosy.adapt.surgery import swap
from argosy.core import progress
from argosy.core.errors import BadInput, SettingsError
from argosy.infer import completions as answers
from argosy.infer import load as load_module
from argosy.infer.engine import cached_engine as held
from argosy.infer.engine import runner as runner_module
from argosy.infer.engine.request import Request
from argosy.infer.forward import sequences
from argosy.infer.lm import LM
from argosy.infer.load import load_lm
from argosy.infer.settings import EngineSettings
from argosy.models import FAMILIES
from argosy.models.parts.stack import Scan, Unroll
from argosy.models.parts.weight import put, variable
from argosy.weights.build import as_dtype, random_model

PROMPTS = [[5, 9, 100, 23, 7, 60, 61, 62, 63], [17], [1, 2, 3, 4]]


@pytest.fixture(scope="module", params=default("unroll", of=("unroll", "scan")))
def lm(request):
    config = CASES["llama-plain"]
    return LM(config, noisy_model(config, Unroll() if request.param == "unroll" else Scan()), LettersTokenizer())


class LettersTokenizer:
    """Ids as characters, some of them halves of a two-byte letter."""

    vocab, bos, eos, adds_bos, chat_template, special = 113, None, None, False, None, {}

    def encode(self, text, special=False):
        return [ord(c) for c in text]

    def decode(self, ids):
        return "".join(map(self.letter, ids))

    @staticmethod
    def letter(token):
        return chr(token) if token >= 32 else chr(0x100 + token)

    def stream(self):
        return Letters()


class Letters:
    def push(self, token):
        return LettersTokenizer.letter(token)

    def end(self):
        return ""


def slowly(lm, prompt, n):
    ids = list(prompt)
    for _ in range(n):
        ids.append(int(np.argmax(lm.logits([ids])[0, -1])))
    return ids[len(prompt) :]


def test_greedy_equals_recomputing_everything_rows_of_unequal_length(lm):
    answers = lm.generate(PROMPTS, 12, ignore_eos=True)
    for prompt, answer in zip(PROMPTS, answers):
        assert answer.tokens == slowly(lm, prompt, 12)
        assert (answer.finish_reason, answer.prompt_tokens) == ("length", len(prompt))
        assert answer.text == lm.tokenizer.decode(answer.tokens)


def test_logprobs_are_those_of_the_whole_sequence(lm):
    answer = lm.generate([PROMPTS[0]], 6, ignore_eos=True)[0]
    ids = PROMPTS[0] + answer.tokens
    logits = lm.logits([ids])[0].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = [logprobs[len(PROMPTS[0]) - 1 + i, t] for i, t in enumerate(answer.tokens)]
    assert relative(answer.logprobs, expected) < 1e-4


def test_draws_depend_on_the_seed_and_not_on_the_rows_beside(lm):
    together = lm.generate(PROMPTS, 10, temperature=1.0, seed=3, ignore_eos=True)
    alone = lm.generate(PROMPTS[:1], 10, temperature=1.0, seed=3, ignore_eos=True)
    assert together[0].tokens == alone[0].tokens
    other = lm.generate(PROMPTS, 10, temperature=1.0, seed=4, ignore_eos=True)
    assert [c.tokens for c in other] != [c.tokens for c in together]
    same_prompt = lm.generate([PROMPTS[0]] * 3, 10, temperature=1.0, seed=3, ignore_eos=True)
    assert len({tuple(c.tokens) for c in same_prompt}) == 3, "rows share their randomness"


def test_rows_of_neighboring_seeds_have_nothing_in_common(lm):
    """A seed and a row that were added would give row 1 of seed 0 the answer of row 0 of seed 1."""
    answers = [lm.generate([PROMPTS[0]] * 3, 10, temperature=1.0, seed=s, ignore_eos=True) for s in (0, 1, 2**32, (0, 1))]
    assert len({tuple(c.tokens) for row in answers for c in row}) == 12


@pytest.mark.slow
def test_more_prompts_than_run_at_a_time_wait(lm):
    """Each has the same stream beside one neighbor as beside all."""
    together = lm.generate(PROMPTS * 2, 8, temperature=1.0, ignore_eos=True)
    other = LM(lm.config, lm.module, lm.tokenizer, engine_settings=EngineSettings(slots=2))
    assert [c.tokens for c in other.generate(PROMPTS * 2, 8, temperature=1.0, ignore_eos=True)] == [c.tokens for c in together]
    assert other._held._engine.settings.slots == 2


@pytest.mark.slow
def test_longrope_is_decided_once_for_a_model():
    """Its two tables differ from the original context on, 16 tokens here. Which one a model has depends neither on how long a
    sequence is nor on how long it may become: a rollout agrees with the training step that sees how long it became."""
    config = CASES["phi-long"]

    def taking(table):
        scaling = config.rope.scaling.model_copy(update={"table": table})
        return LM(
            c := config.model_copy(update={"rope": config.rope.model_copy(update={"scaling": scaling})}), noisy_model(c, Unroll())
        )

    auto, short, long = (taking(table) for table in ("auto", "short", "long"))
    prompt = [5, 9, 100, 23, 7]
    for most in (4, 30):
        answer = auto.generate([prompt], most, ignore_eos=True)[0]
        whole = jax.nn.log_softmax(auto.logits([*prompt, *answer.tokens])[0])
        scored = [float(whole[len(prompt) - 1 + i, token]) for i, token in enumerate(answer.tokens)]
        assert answer.logprobs == pytest.approx(scored, rel=1e-4, abs=1e-4)
    assert relative(auto.logits([prompt]), long.logits([prompt])) == 0
    assert relative(auto.logits([prompt]), short.logits([prompt])) > 1e-3
    assert config.model_copy(update={"context": 16}).reaches()[0].rope.scaling.table == "short"


def test_repetition_penalty_counts_prompt_and_answer(lm):
    free = lm.generate([PROMPTS[0]], 30, ignore_eos=True)[0].tokens
    bound = lm.generate([PROMPTS[0]], 30, repetition_penalty=1e6, ignore_eos=True)[0].tokens
    assert len(set(bound) | set(PROMPTS[0])) == len(bound) + len(set(PROMPTS[0])), "a token came again"
    assert bound != free


def test_stop_tokens_end_an_answer_and_are_no_part_of_it(lm):
    free = lm.generate([PROMPTS[0]], 12, ignore_eos=True)[0].tokens
    stop = free[5]
    answer = lm.generate([PROMPTS[0]], 12, stop_tokens=[stop])[0]
    assert answer.tokens == free[: free.index(stop)]
    assert answer.finish_reason == "stop"


def test_stop_strings_are_held_back_while_streaming(lm):
    whole = lm.generate([PROMPTS[0]], 12, ignore_eos=True)[0].text
    stop = whole[4:7]
    answer = lm.generate([PROMPTS[0]], 12, stop=[stop], ignore_eos=True)[0]
    assert answer.text == whole[: whole.index(stop)]
    assert answer.finish_reason == "stop"
    pieces = list(lm.stream(PROMPTS[0], 12, stop=[stop], ignore_eos=True))
    assert "".join(pieces) == answer.text
    unmet = whole[4:6] + "\x00"
    assert "".join(lm.stream(PROMPTS[0], 12, stop=[unmet], ignore_eos=True)) == whole


@pytest.mark.parametrize(
    ("prompts", "options", "match"),
    [
        ([], {}, "no prompt"),
        ([[]], {}, "empty prompt"),
        ([[113]], {}, "outside"),
        ([[-1]], {}, "outside"),
        ([[1] * 200], {}, "fills"),
        ([[1] * 201], {}, "more than"),
        ([[1]], {"max_tokens": 0}, "max_tokens"),
        ([[1]], {"stop": [""]}, "stop"),
        ("a text", {}, "list of prompts"),
        ([[1]], {"top_k": 5}, "temperature"),
    ],
)
def test_bad_input_is_reported_before_work(lm, prompts, options, match):
    with pytest.raises(BadInput, match=match):
        lm.generate(prompts, **options)


@pytest.mark.parametrize(
    ("tokens", "match"), [([[1.7, 2.0]], "whole numbers"), ([[1, 2], [3]], "unequal"), ([[2**32 + 5]], "outside")]
)
def test_logits_take_whole_numbers_in_even_rows(lm, tokens, match):
    with pytest.raises(BadInput, match=match):
        lm.logits(tokens)


def test_a_misspelt_setting_is_reported_with_the_right_name(lm):
    with pytest.raises(SettingsError) as error:
        lm.generate([[1]], temprature=1.0)
    assert "temperature" in str(error.value)


def test_a_long_prompt_does_not_shorten_the_others(lm):
    long, short = lm.generate([[3] * 196, [5, 9]], 20, ignore_eos=True)
    assert (len(long.tokens), len(short.tokens)) == (4, 20)
    assert short.tokens == slowly(lm, [5, 9], 20)


@pytest.mark.slow
def test_an_answer_over_many_pages_is_that_of_the_whole_sequence(lm):
    prompt = [5, 9, 100]
    answer = lm.generate([prompt], 150, ignore_eos=True)[0]
    whole = lm.logits([[*prompt, *answer.tokens]])[0, 2:-1]
    best = np.sort(whole, -1)
    clear = best[:, -1] - best[:, -2] > 1e-3  # else rounding decides
    assert clear.sum() > 100
    assert (whole.argmax(-1) == answer.tokens)[clear].all()


def test_surgery_after_the_first_answer_is_seen():
    config = CASES["llama-plain"]
    model = LM(config, noisy_model(config, Unroll()))
    before = model.logits([PROMPTS[0]])
    swap(model.module, r"layers\..*", int8)
    assert 1e-4 < relative(model.logits([PROMPTS[0]]), before) < 0.3


def test_a_changed_weight_changes_the_next_answer():
    """In place, by `put`, and by setting a module's attribute: what is kept from call to call sees each."""
    config = CASES["llama-plain"]
    model = LM(config, noisy_model(config, Unroll()))
    seen = [model.logits([PROMPTS[0]])]
    whole = model.sequences()
    assert model.sequences() is whole

    def changed():
        seen.append(model.logits([PROMPTS[0]]))
        return relative(seen[-1], seen[-2]) > 1e-4

    scale = variable(model.module, "norm.scale")
    scale.set_value(scale.get_value() * 2)
    assert changed()
    put(model.module, {"norm.scale": scale.get_value() * 3})
    assert changed()
    assert model.sequences() is whole, "values are read, not split again"
    model.module.logit_cap = 0.5
    assert changed()
    head = model.module.head or model.module.embed
    head.w = nnx.Param(head.w.get_value() * 0.5, **head.w.get_metadata())
    assert changed()
    model.module = noisy_model(config, Unroll())
    assert changed()
    model.module.dtype = jnp.bfloat16
    assert changed()
    assert model.generate([PROMPTS[0]], 4, ignore_eos=True)[0].logprobs


def test_a_second_size_shares_the_programs_of_the_first(lm):
    """Another max_tokens, prompt length or filter within the same room compiles nothing."""
    for length in (40, 40, 39):
        # The second time, the prompts are found in the prefix cache; the third time, only a beginning of the first one.
        lm.generate([[3] * length, *PROMPTS], 60, temperature=1.0, ignore_eos=True)
    engine = lm._held._engine
    before = engine.stats.compilations
    lm.generate([[3] * 33, *PROMPTS], 50, temperature=0.5, top_p=0.9, frequency_penalty=0.1, ignore_eos=True)
    lm.generate([[3] * 36, *PROMPTS], 30, ignore_eos=True)
    assert lm._held._engine is engine
    assert engine.stats.compilations == before


def test_an_engine_that_slept_answers_as_before(lm):
    """Its cache is gone, its programs are not; nothing is taken from the cache of before."""
    first = lm.generate([[3] * 40, *PROMPTS], 8, ignore_eos=True)
    engine = lm._held._engine
    before, reused = engine.stats.compilations, engine.stats.reused_tokens
    lm.sleep()
    assert engine.runner._caches is None
    second = lm.generate([[3] * 40, *PROMPTS], 8, ignore_eos=True)
    assert [answer.tokens for answer in second] == [answer.tokens for answer in first]
    assert (engine.stats.compilations, engine.stats.reused_tokens) == (before, reused)
    engine.add(Request([3] * 4, 8))
    engine.step()
    assert not engine.sleep(), "a request runs"
    lm.forget()


def test_what_takes_long_is_reported_and_what_does_not_is_not(lm, monkeypatch):
    messages = []
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    with progress.telling(messages.append, "compiling ..."):
        for _ in range(1000):
            if messages:
                break
            time.sleep(0.01)
    assert messages == ["compiling ..."]
    monkeypatch.setattr(progress, "PATIENCE", 1000.0)
    with progress.telling(messages.append, "not this"):
        pass
    assert messages == ["compiling ..."]


def test_compiling_is_announced_with_what_for(monkeypatch):
    messages = []
    config = CASES["llama-plain"]
    model = LM(config, noisy_model(config, Unroll()), say=messages.append)
    monkeypatch.setattr(runner_module, "telling", lambda say, text: nullcontext(say(text)))
    model.generate([PROMPTS[0]], 4, ignore_eos=True)
    assert messages[0] == "compiling a step of 0 decoding rows and 1 x 32 prompt tokens"
    assert "compiling a step of 1 decoding rows and 0 x 0 prompt tokens" in messages
    for expected in (["compiling copies of pages"], []):
        # The prompt is known from the time before.
        messages.clear()
        model.generate([PROMPTS[0]], 4, ignore_eos=True)
        assert messages == expected


def test_room_grows_by_large_steps_and_to_the_context_at_most():
    settings = EngineSettings()
    room = held.EngineRoom().grown([100], 8192, settings)
    assert room == (1, 512, 32)
    assert room.grown([512], 8192, settings) == room
    assert room.grown([513], 8192, settings) == (1, 2048, 128)
    assert room.grown([8000] * 2, 8192, settings) == (8, 8192, 1024)
    assert room.grown([100] * 1000, 200, settings) == (32, 200, 256)
    assert room.grown([100] * 1000, 200, EngineSettings(slots=5, page=8, pages=70)) == (5, 200, 70)


@pytest.mark.slow
def test_engine_settings_bound_what_is_generated(lm):
    other = LM(lm.config, lm.module, lm.tokenizer, engine_settings=EngineSettings(slots=1, page=8, pages=3, context=24, budget=32))
    assert other.longest == 24
    answers = other.generate([PROMPTS[0], PROMPTS[2]], 50, ignore_eos=True)
    assert [len(answer.tokens) for answer in answers] == [24 - 9, 24 - 4]
    assert answers[1].tokens == slowly(lm, PROMPTS[2], 20)
    assert other._held._engine.pages.count == 3
    with pytest.raises(BadInput, match="the engine's context of 24 tokens"):
        other.generate([[1] * 24])
    other.engine_settings = EngineSettings(pages=3)
    with pytest.raises(BadInput, match="3 pages of 16 tokens holds no sequence of 200"):
        other.generate([[1]], 1)


def test_an_encoder_is_loaded_without_settings_of_an_engine(tmp_path):
    config = FAMILIES["bert"].examples()["plain"]
    LM(config, random_model(config, 0).module).save(tmp_path / "bert")
    assert not argosy.load(tmp_path / "bert").config.causal
    with pytest.raises(BadInput, match="this one is an encoder"):
        argosy.load(tmp_path / "bert", engine={"slots": 2})
    with pytest.raises(SettingsError, match="did you mean `slots`"):
        argosy.load(tmp_path / "bert", engine={"slot": 2})


def test_two_answers_may_be_read_in_turn(lm):
    expected = [c.tokens for c in lm.generate(PROMPTS[:2], 10, ignore_eos=True)]
    first, second = (lm.pieces([p], 10, ignore_eos=True) for p in PROMPTS[:2])
    for _ in zip(first, second):
        pass
    assert [list(first), list(second)] == [[], []]
    assert [first.completions[0].tokens, second.completions[0].tokens] == expected


@pytest.mark.slow
@pytest.mark.parametrize("state", ["stopped", "running"])
def test_a_longer_prompt_gets_room_whatever_the_engine_was_doing(lm, state):
    """A stop string is found after the next step has begun, so the engine was busy, and kept its size."""
    other = LM(lm.config, lm.module, lm.tokenizer)
    other.sequences()  # looks at the module, after which the room stays
    other._held._room = held.EngineRoom(1, 32, 0)
    word = lm.generate([PROMPTS[2]], 3, ignore_eos=True)[0].text[-1]
    others = other.pieces([PROMPTS[0]], 12, stop=[word] if state == "stopped" else [], ignore_eos=True)
    if state == "stopped":
        other.generate([PROMPTS[2]], 12, stop=[word], ignore_eos=True)
    else:
        next(iter(others))
    assert other._held._engine.context == 32
    assert other.generate([PROMPTS[0] * 5], 4, ignore_eos=True)[0].tokens == slowly(lm, PROMPTS[0] * 5, 4)
    list(others)
    expected = lm.generate([PROMPTS[0]], 12, stop=[word] if state == "stopped" else [], ignore_eos=True)
    assert others.completions[0].tokens == expected[0].tokens


def test_an_answer_that_nobody_reads_on_frees_its_pages(lm):
    answers = lm.pieces([PROMPTS[0]], 50, ignore_eos=True)
    next(iter(answers))
    assert lm._held._engine.busy
    answers._pieces.close()
    lm.generate([PROMPTS[1]], 2, ignore_eos=True)
    assert not lm._held._engine.busy
    assert lm._held._engine.pages.used == 0


def test_score_is_the_log_probability_of_each_token(lm, monkeypatch):
    monkeypatch.setattr(sequences, "CHUNK", 5)
    monkeypatch.setattr(sequences, "_scores", sequences._scores.__wrapped__)
    for prompt, scores in zip(PROMPTS, lm.score(PROMPTS), strict=True):
        whole = jax.nn.log_softmax(lm.logits([prompt])[0].astype(np.float64))
        expected = [whole[i, token] for i, token in enumerate(prompt[1:])]
        assert len(scores) == len(prompt) - 1
        np.testing.assert_allclose(scores, expected, atol=1e-5)


def test_the_likeliest_tokens_are_those_of_the_logits(lm):
    answer = lm.generate([PROMPTS[0]], 5, top=3, temperature=1.0, ignore_eos=True)[0]
    whole = np.asarray(jax.nn.log_softmax(lm.logits([[*PROMPTS[0], *answer.tokens]])[0]))
    for i, top in enumerate(answer.top):
        row = whole[len(PROMPTS[0]) - 1 + i]
        assert [t for t, _ in top] == np.argsort(-row)[:3].tolist()
        np.testing.assert_allclose([p for _, p in top], np.sort(row)[::-1][:3], atol=1e-4)
    assert len(answer.top) == 5
    assert lm.generate([PROMPTS[0]], 2, ignore_eos=True)[0].top == []


def test_bad_words_are_banned_as_text_and_as_ids(lm):
    free = lm.generate([PROMPTS[0]], 12, ignore_eos=True)[0]
    word = free.text[6:8]
    assert word in free.text
    for words in ([word], [[ord(c) if ord(c) < 0x100 else ord(c) - 0x100 for c in word]]):
        answer = lm.generate([PROMPTS[0]], 12, bad_words=words, ignore_eos=True)[0]
        assert word not in answer.text
        assert answer.text[:6] == free.text[:6]
    with pytest.raises(BadInput, match="nearly everything"):
        lm.generate([PROMPTS[0]], 2, bad_words=[" "])


def test_no_answer_ends_before_its_least_tokens(lm):
    free = lm.generate([PROMPTS[0]], 12, ignore_eos=True)[0]
    answer = lm.generate([PROMPTS[0]], 12, stop_tokens=[free.tokens[3]], min_tokens=6)[0]
    assert len(answer.tokens) >= 6
    assert free.tokens[3] not in answer.tokens[:6]
    stop = free.text[2]
    answer = lm.generate([PROMPTS[0]], 12, stop=[stop], min_tokens=6, ignore_eos=True)[0]
    assert len(answer.tokens) >= 6
    assert answer.tokens[:6] == free.tokens[:6]


def test_what_ended_an_answer_is_told(lm):
    free = lm.generate([PROMPTS[0]], 12, ignore_eos=True)[0]
    by_token = lm.generate([PROMPTS[0]], 12, stop_tokens=[free.tokens[5]])[0]
    assert by_token.stopped_by == free.tokens[5]
    by_text = lm.generate([PROMPTS[0]], 12, stop=["never", free.text[4:7]], ignore_eos=True)[0]
    assert by_text.stopped_by == free.text[4:7]
    assert free.stopped_by is None


def test_an_answer_keeps_the_space_in_front_of_it():
    """Prompt and answer, put together, are the text of all their tokens."""
    model = load_lm(shared("models/stories260k"))
    answer = model.generate(["Once upon"], 12)[0]
    assert answer.text.startswith(" ")
    ids = model.encode("Once upon") + answer.tokens
    assert "Once upon" + answer.text == model.tokenizer.decode(ids)


def test_answers_are_run_through_once(lm):
    answers = lm.pieces([PROMPTS[0]], 4, ignore_eos=True)
    assert [len(list(answers)), len(list(answers))] == [4, 0]
    assert len(answers.completions[0].tokens) == 4


def test_generation_ends_with_the_context(lm):
    answer = lm.generate([[3] * 195], 50, ignore_eos=True)[0]
    assert (len(answer.tokens), answer.finish_reason) == (5, "length")


def test_a_model_larger_than_memory_is_refused(monkeypatch):
    """The system would end the process, with no word."""
    monkeypatch.setattr("argosy.observe.environment.memory_bytes", lambda: (1 << 20, 1 << 20))
    with pytest.raises(BadInput, match="weights in float32 need"):
        argosy.load("qwen3-0.6b", random=0)


@pytest.mark.parametrize("dtype", ["float64", "float8_e4m3fn", "int8", "bf16", 7])
def test_types_that_nothing_is_computed_in(dtype):
    with pytest.raises(BadInput, match="models do not compute in dtype"):
        as_dtype(dtype)


def test_a_model_says_what_it_is():
    lm = load_module.random_lm(CASES["llama-plain"], 0)
    assert repr(lm) == f"LM(LlamaConfig, {lm.config.parameters():,} parameters in float32, no tokenizer)"


def test_adapters_are_merged_before_a_model_is_saved(tmp_path):
    lm = load_module.random_lm(CASES["llama-plain"], 0)
    with pytest.raises(BadInput, match="no adapters"):
        lm.merge()
    swap(lm.module, r"layers\..*", lambda of: LoRA(of, 2, 2.0))
    with pytest.raises(BadInput, match="the model has adapters, such as on layers"):
        lm.save(tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("prompts", [[{"role": "user", "content": "hi"}], [[{"role": "user", "content": "hi"}]]])
def test_messages_are_answered_by_chat_prompt(prompts):
    with pytest.raises(BadInput, match="not messages") as caught:
        answers.check_prompts(prompts, "generate")
    assert caught.value.hint == "lm.generate([lm.chat_prompt(messages)])"


def test_a_name_of_another_library_is_answered(lm):
    with pytest.raises(SettingsError, match="unknown setting `max_new_tokens`") as caught:
        lm.generate([[1]], max_new_tokens=4)
    assert caught.value.problems[0].hint == "did you mean `max_tokens`?"
