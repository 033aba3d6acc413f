"""Which tasks are asked, from which rows, with which words; and every mistake in them, before a model is loaded."""

import gzip
import json
from pathlib import Path

import pytest
from helpers import shared

from argosy.core.errors import BadInput, UnknownName, UserError
from argosy.evals import extract
from argosy.evals.plan import find_task_file, names, plan
from argosy.evals.prompts import choices, examples, few_shot_example, question
from argosy.evals.rows import LAYOUTS, read_rows
from argosy.evals.settings import EvalSettings
from argosy.evals.tasks import OF_VECTORS, PLAIN, TASKS

CHOICES = [{"query": f"Question: number {i}", "choices": ["a", "b", "c"], "gold": i % 3} for i in range(12)]


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# ---------------------------------------------------------------- names and files


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [
        ("arc_easy", ["arc_easy"]),
        ("arc", ["arc_easy", "arc_challenge"]),
        ("lambada", ["lambada_openai"]),
        ("copa, copa,piqa", ["copa", "piqa"]),
        ("arc_easy_600.jsonl", ["arc_easy"]),
        ("bbh", [name for name in TASKS if name.startswith("bbh_")]),
    ],
)
def test_names_of_tasks(tasks: str, expected: list[str]):
    assert [task.name for task in names(tasks)] == expected


def test_an_unknown_task_is_answered_with_the_nearest_and_the_list():
    with pytest.raises(UnknownName) as error:
        names("arc_esy")
    assert error.value.hint == "did you mean `arc_easy`?"
    assert all(name in str(error.value.where) for name in TASKS)


def test_files_are_found_by_task_here_and_one_folder_below(tmp_path: Path):
    (tmp_path / "eval").mkdir()
    path = write(tmp_path / "eval" / "arc_easy_12.jsonl", CHOICES)
    assert find_task_file(TASKS["arc_easy"], tmp_path) == path
    assert find_task_file(TASKS["arc_easy"], tmp_path / "eval") == path
    with pytest.raises(BadInput, match="no file of arc_challenge"):
        find_task_file(TASKS["arc_challenge"], tmp_path)
    write(tmp_path / "arc_easy.jsonl", CHOICES)
    with pytest.raises(BadInput, match="2 files of arc_easy"):
        find_task_file(TASKS["arc_easy"], tmp_path)


def test_every_task_file_of_the_shared_data_is_found_and_whole():
    data = shared("eval").parent
    of_texts = {name for name, task in TASKS.items() if task.kind not in ("perplexity", *OF_VECTORS)}
    plans = plan(EvalSettings(tasks=",".join(sorted(of_texts)), data=str(data)))
    assert {plan_of.task.name for plan_of in plans} == of_texts
    assert {plan_of.total for plan_of in plans if plan_of.task.name.startswith("bbh")} == {100}
    gsm8k = next(plan_of for plan_of in plans if plan_of.task.name == "gsm8k")
    assert (gsm8k.total, gsm8k.shots, len(gsm8k.pool)) == (1319, 5, 7473)


def test_a_file_of_ones_own_is_recognized_by_its_fields(tmp_path: Path):
    rows = {
        "choices": CHOICES,
        "options": [{"context_options": ["a", "b"], "continuation": "c", "gold": 1}],
        "letters": [{"question": "q", "choices": ["a", "b"], "gold": 1}],
        "continuation": [{"context": "a", "continuation": "b"}],
        "input-target": [{"input": "a", "target": "b"}],
        "question-answer": [{"question": "a", "answer": "b"}],
        "context-answer": [{"context": "a", "answer": "b"}],
        "instructions": [{"prompt": "a", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}],
        "scored-pairs": [{"sentence1": "a", "sentence2": "b", "score": score} for score in (1, 2.5)],
        "labeled-pairs": [{"sentence1": "a", "sentence2": "b", "label": label} for label in (1, 0)],
        "text": [{"text": "a"}],
    }
    assert set(rows) == set(LAYOUTS) == set(PLAIN)
    for layout, some in rows.items():
        (planned,) = plan(EvalSettings(data=str(write(tmp_path / "mine.jsonl", some))))
        assert (planned.task.name, planned.task.layout) == ("mine", layout)
        if planned.task.prompt:
            assert question(planned.task, some[0])
    (planned,) = plan(EvalSettings(data=str(write(tmp_path / "arc_easy_12.jsonl", CHOICES))))
    assert planned.task == TASKS["arc_easy"], "a file named after a task asks as that task does"


def test_files_may_be_compressed_and_have_blank_lines(tmp_path: Path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n\n{"text": "b"}\n'))
    assert [row["text"] for row in read_rows(path)] == ["a", "b"]
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(BadInput, match=r"not a whole \.gz"):
        read_rows(path)


def test_limit_takes_the_first_rows_and_says_so(tmp_path: Path):
    (planned,) = plan(EvalSettings(data=str(write(tmp_path / "arc_easy.jsonl", CHOICES)), limit=5))
    assert planned.rows == CHOICES[:5]
    assert str(planned) == "arc_easy (the first 5 of 12 rows)"


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("change", "problem", "where"),
    [
        ({"choices": None}, "no field `choices`", "row 2 of 3"),
        ({"choices": ["a"]}, "a list of at least two texts", "row 2 of 3"),
        ({"choices": ["a", 3]}, "a list of at least two texts", "row 2 of 3"),
        ({"query": 5}, "`query` should be text, not 5", "row 2 of 3"),
        ({"gold": 3}, "gold = 3, and there are 3 choices", "row 2 of 3"),
        ({"gold": -1}, "gold = -1", "row 2 of 3"),
        ({"gold": True}, "the place of the right choice", "row 2 of 3"),
        ({"gold": "a"}, "the place of the right choice", "row 2 of 3"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, change: dict, problem: str, where: str):
    row = {name: value for name, value in (CHOICES[1] | change).items() if value is not None}
    path = write(tmp_path / "arc_easy.jsonl", [CHOICES[0], row, CHOICES[2]])
    with pytest.raises(BadInput) as error:
        plan(EvalSettings(tasks="arc_easy", data=str(path)))
    assert problem in error.value.what
    assert where in str(error.value.where)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "holds `preference` records"),
        ({"prompt": "a", "completion": "b", "label": True}, "holds `kto` records"),
        ({"prompt": "a", "completions": ["b"], "labels": [True]}, "holds `stepwise` records"),
        ({"prompt": "a"}, "no known layout"),
    ],
)
@pytest.mark.parametrize("tasks", [None, "perplexity"])
def test_rows_without_a_loss_of_answers_are_refused_with_their_keys(tmp_path: Path, row: dict, problem: str, tasks: str | None):
    path = write(tmp_path / "mine.jsonl", [row])
    with pytest.raises(BadInput) as caught:
        plan(EvalSettings(data=str(path), tasks=tasks))
    assert problem in caught.value.what
    assert all(name in str(caught.value) for name in row)


@pytest.mark.parametrize("setting", ["chat", "shots", "window", "stride"])
def test_settings_that_mean_nothing_for_answers_are_refused(tmp_path: Path, setting: str):
    path = write(tmp_path / "mine.jsonl", [{"prompt": "a", "completion": "b"}])
    with pytest.raises(BadInput, match=setting):
        plan(EvalSettings(data=str(path), **{setting: True if setting == "chat" else 8}))


def test_a_wrong_record_is_named(tmp_path: Path):
    path = write(tmp_path / "mine.jsonl", [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": 3}])
    with pytest.raises(BadInput, match="a number") as caught:
        plan(EvalSettings(data=str(path)))
    assert "row 2 of 2" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "holds no rows"),
        ("{", "not JSON"),
        ("[1]\n", "not a JSON object"),
        ('{"a": 1}\n', "no known layout"),
        ("\udcff", "not UTF-8"),
    ],
)
def test_a_file_that_is_no_task_file(tmp_path: Path, text: str, problem: str):
    path = tmp_path / "a.jsonl"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(BadInput, match=problem):
        plan(EvalSettings(data=str(path)))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ({}, "no tasks"),
        ({"tasks": "imges"}, "unknown task `imges`"),
        ({"tasks": "images,perplexity"}, "tasks=images beside other tasks"),
        ({"tasks": "arc_easy"}, "no task files"),
        ({"tasks": "arc_easy", "data": "gone"}, "no file or folder gone"),
        ({"tasks": "perplexity", "data": "."}, "perplexity needs a text"),
        ({"tasks": "perplexity", "data": ".", "text": "gone"}, "no file gone"),
        ({"tasks": "arc_easy,copa", "data": "arc_easy.jsonl"}, "2 tasks and one file"),
        ({"tasks": "arc_easy", "data": "a.txt"}, "not a file of JSON lines"),
        ({"tasks": "perplexity", "data": "a.txt", "shots": 2}, "takes no examples"),
        ({"data": "a.txt", "chat": True}, "asks no question"),
        ({"tasks": "winogrande", "data": "winogrande.jsonl", "chat": True}, "asks no question"),
        ({"tasks": "mmlu_dev", "data": "letters.jsonl"}, "no field `subject`"),
    ],
)
def test_settings_that_fit_no_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: dict, problem: str):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "arc_easy.jsonl", CHOICES)
    write(tmp_path / "winogrande.jsonl", [{"context_options": ["a", "b"], "continuation": "c", "gold": 1}])
    write(tmp_path / "letters.jsonl", [{"question": "q", "choices": ["a", "b"], "gold": 1}])
    (tmp_path / "a.txt").write_text("words")
    with pytest.raises(UserError, match=problem):
        plan(EvalSettings(**words))


# ---------------------------------------------------------------- prompts


def test_prompts_read_as_published_ones_do():
    row = {"query": "Question: why?\n", "choices": ["so", "thus"], "gold": 1}
    assert question(TASKS["piqa"], row) == "Question: why?\nAnswer:"
    assert choices(TASKS["piqa"], row) == [" so", " thus"]
    assert few_shot_example(TASKS["piqa"], row) == "Question: why?\nAnswer: thus"
    letters = {"question": "why?", "choices": ["so", "thus", "hence", "as"], "gold": 2, "subject": "logic"}
    assert question(TASKS["mmlu_dev"], letters) == "why?\nA. so\nB. thus\nC. hence\nD. as\nAnswer:"
    assert choices(TASKS["mmlu_dev"], letters) == [" A", " B", " C", " D"]
    options = {"context_options": ["he", "she"], "continuation": "went.", "gold": 1}
    assert few_shot_example(TASKS["winogrande"], options) == "she went."
    assert few_shot_example(TASKS["simple_arithmetic"], {"context": "1 + 1 =", "continuation": " 2"}) == "1 + 1 = 2"
    braces = {"query": "{not a field} {0}", "choices": ["so", "thus"], "gold": 1}
    assert question(TASKS["piqa"], braces) == "{not a field} {0}\nAnswer:"


@pytest.mark.parametrize("seed", [0, 1])
def test_examples_never_hold_the_asked_row(tmp_path: Path, seed: int):
    rows = [*CHOICES, CHOICES[3]]  # one row twice
    (planned,) = plan(EvalSettings(data=str(write(tmp_path / "arc_easy.jsonl", rows)), shots=6, seed=seed))
    before = examples(planned, seed)
    for number, row in enumerate(rows):
        text = before(number)
        assert text.count("Answer:") == 6
        assert f"{row['query']}\n" not in text
        assert text.endswith("\n\n")
    assert len({before(number) for number in range(len(rows))}) < len(rows), "most rows share their examples"


def test_examples_depend_on_the_seed(tmp_path: Path):
    (planned,) = plan(EvalSettings(data=str(write(tmp_path / "arc_easy.jsonl", CHOICES)), shots=4))
    assert examples(planned, 0)(0) == examples(planned, 0)(0) != examples(planned, 1)(0)


def test_examples_of_mmlu_are_of_the_same_subject(tmp_path: Path):
    rows = [
        {"question": f"{s} {i}", "choices": ["a", "b"], "gold": 0, "subject": s} for s in ("law", "art") for i in range(4)
    ]
    path = write(tmp_path / "mmlu_dev.jsonl", rows)
    (planned,) = plan(EvalSettings(data=str(path), shots=3))
    text = examples(planned, 0)(0)
    assert "about law." in text
    assert [f"law {i}" in text for i in range(4)] == [False, True, True, True]
    assert "art " not in text
    (planned,) = plan(EvalSettings(data=str(path), shots=4))
    with pytest.raises(BadInput, match="3 other rows of subject `law`"):
        examples(planned, 0)(0)


def test_examples_come_from_the_file_for_them_if_it_lies_beside(tmp_path: Path):
    rows = [{"question": "one?", "answer": "1 #### 1"}]
    path = write(tmp_path / "gsm8k_test.jsonl", rows)
    write(tmp_path / "gsm8k_train.jsonl", [{"question": f"other {i}?", "answer": f"{i} #### {i}"} for i in range(6)])
    (planned,) = plan(EvalSettings(tasks="gsm8k", data=str(path)))
    text = examples(planned, 0)(0)
    assert text.count("other") == 5


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize(
    ("task", "row", "text", "strict", "flexible"),
    [
        ("simple_arithmetic", {"continuation": " -734"}, " -734", True, True),
        ("simple_arithmetic", {"continuation": " -734"}, " -734 and", False, True),
        ("simple_arithmetic", {"continuation": " 1598"}, " 1,598.", True, True),
        ("simple_arithmetic", {"continuation": " 12"}, " 1 2", False, False),
        ("gsm8k", {"answer": "so 9*2=18\n#### 18"}, "He has 9*2=18.\n#### 18", True, True),
        ("gsm8k", {"answer": "#### 1,018"}, "it is $1018.00", False, True),
        ("gsm8k", {"answer": "#### 18"}, "#### 18 and 7 more", True, False),
        ("gsm8k", {"answer": "#### 18"}, "no number", False, False),
        ("svamp", {"answer": "1"}, " 1.0", True, True),
        ("svamp", {"answer": "45"}, "52 - 7 is 45.", False, True),
        ("bbh_boolean_expressions", {"target": "False"}, " False", True, True),
        ("bbh_boolean_expressions", {"target": "False"}, " It is False, not True", False, True),
        ("bbh_boolean_expressions", {"target": "True"}, " Falsehood", False, False),
        ("bbh_date_understanding", {"target": "(B)"}, " (B)", True, True),
        ("bbh_date_understanding", {"target": "(B)"}, " the answer is (B) 12/25", False, True),
        ("bbh_multistep_arithmetic_two", {"target": "-24"}, " -24", True, True),
        ("bbh_navigate", {"target": "No"}, " no.", True, True),
        ("bbh_navigate", {"target": "No"}, " Nothing", False, False),
        ("bbh_word_sorting", {"input": "Sort: List: b a c", "target": "a b c"}, " a b c", True, True),
        ("bbh_word_sorting", {"input": "Sort: List: b a c", "target": "a b c"}, "1. a 2. b 3. c", False, True),
        ("bbh_word_sorting", {"input": "Sort: List: b a c", "target": "a b c"}, "b a c, so: a b c", False, True),
        ("bbh_word_sorting", {"input": "Sort: List: b a c", "target": "a b c"}, " a c b", False, False),
        ("bbh_word_sorting", {"input": "Sort: List: it&t a it", "target": "a it it&t"}, "a, it, it&t", True, True),
    ],
)
def test_answers_are_found_strictly_and_flexibly(task: str, row: dict, text: str, strict: bool, flexible: bool):
    assert extract.is_right(TASKS[task], row, text) == (strict, flexible)
