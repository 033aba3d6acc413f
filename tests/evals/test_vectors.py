"""Vectors of texts in `argosy eval`: the figures against other libraries, the files, and a model on real questions."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import shared
from scipy import stats

from argosy.cli import main
from argosy.core.errors import BadInput, UserError
from argosy.data.tokenizers.load import find_tokenizer
from argosy.evals.plan import plan
from argosy.evals.settings import EvalSettings
from argosy.evals.vectors import measures
from argosy.evals.vectors.metrics import best_documents, pair_figures, pearson, ranking_figures, spearman
from argosy.infer.lm import LM
from argosy.jobs.api import load
from argosy.models import FAMILIES
from argosy.weights.build import random_model
from argosy.weights.hub.sentence_steps import EmbeddingSteps, write_steps


@pytest.mark.parametrize("digits", [1, 9])
def test_correlations_are_those_of_scipy(digits):
    """With one digit many values are equal."""
    rng = np.random.default_rng(0)
    a = rng.normal(size=300).round(digits)
    b = (a + rng.normal(size=300)).round(digits)
    assert pearson(a, b) == pytest.approx(stats.pearsonr(a, b).statistic, abs=1e-12)
    assert spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-12)
    assert spearman(np.ones(300), b) == 0


def test_pairs_by_hand():
    """Four thresholds: precision 1, 1/2 and 2/3 where one more of the two is found."""
    figures = pair_figures(np.array([0.9, 0.7, 0.7, 0.1]), np.array([1, 0, 1, 0]))
    assert figures.ap == pytest.approx(0.5 * 1 + 0.5 * 2 / 3)
    assert figures.accuracy == 0.75
    assert figures.f1 == pytest.approx(0.8)
    # With all of them below the threshold.
    assert pair_figures(np.array([0.9, 0.8, 0.1]), np.array([0, 0, 1])).accuracy == pytest.approx(2 / 3)


def test_pairs_are_those_of_scikit_learn():
    """scikit-learn 1.9.1 on `sklearn_pairs`: average_precision_score, and the best of accuracy_score and f1_score over thresholds."""
    figures = pair_figures(*sklearn_pairs())
    np.testing.assert_allclose(figures, SKLEARN, rtol=0, atol=1e-12)


def sklearn_pairs() -> tuple[np.ndarray, np.ndarray]:
    i = np.arange(200)
    labels = (i * 7919 % 13 < 5).astype(int)
    return np.round(0.3 * labels + (i * 104729 % 101) / 101, 2), labels


SKLEARN = (0.74037180068737, 0.735, 0.65)


def trec_cases() -> tuple[list[str], dict[str, dict[str, int]], np.ndarray]:
    """Documents, grades and scores, many of which are equal."""
    ids = [f"d{i}" for i in range(150)]
    i, q = np.arange(150), np.arange(12)[:, None]
    scores = ((i * 7919 + q * 104729) % 31).astype(np.float32)
    grades = {f"q{k}": {ids[(k * 37 + j * 11) % 150]: (j + k) % 4 for j in range(2 + 3 * k)} for k in range(12)}
    return ids, grades, scores


def test_rankings_are_those_of_trec_eval():
    """pytrec_eval-terrier 0.5.11 on the same scores: ndcg_cut_10, recall_1, recall_10, recall_100, and recip_rank within ten."""
    ids, grades, scores = trec_cases()
    assert len(TREC) == len(grades)
    for (query, relevant), its, want in zip(grades.items(), scores, TREC, strict=True):
        ranked = best_documents(its, ids, 100)
        figures = ranking_figures(ranked, relevant)
        names = ("ndcg_at_10", "recall_at_1", "recall_at_10", "recall_at_100", "mrr_at_10")
        np.testing.assert_allclose([figures[name] for name in names], want, rtol=0, atol=1e-9, err_msg=query)


TREC: list[tuple[float, ...]] = [
    (0.430676558073, 0.0, 1.0, 1.0, 0.25),
    (0.068599848443, 0.0, 0.25, 0.25, 0.166666666667),
    (0.154798865529, 0.0, 0.166666666667, 0.166666666667, 0.2),
    (0.0, 0.0, 0.0, 0.125, 0.0),
    (0.0, 0.0, 0.0, 0.5, 0.0),
    (0.0, 0.0, 0.0, 0.846153846154, 0.0),
    (0.0, 0.0, 0.0, 0.933333333333, 0.0),
    (0.0, 0.0, 0.0, 1.0, 0.0),
    (0.157071368908, 0.0, 0.105263157895, 0.947368421053, 0.333333333333),
    (0.291591678344, 0.045454545455, 0.227272727273, 0.863636363636, 1.0),
    (0.074590380293, 0.0, 0.125, 0.541666666667, 0.166666666667),
    (0.463573546003, 0.038461538462, 0.115384615385, 0.384615384615, 1.0),
]


# ---------------------------------------------------------------- files


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def small_set(folder: Path) -> Path:
    lines(folder / "corpus.jsonl", [{"_id": "a", "title": "Bees", "text": "live in hives"}, {"_id": "b", "text": "Ships sail"}])
    lines(folder / "queries.jsonl", [{"_id": "1", "text": "where do bees live"}, {"_id": "2", "text": "nobody judged this"}])
    (folder / "qrels").mkdir()
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n1\ta\t2\n1\tb\t0\n")
    return folder


def test_a_retrieval_set_is_read_as_in_beir(tmp_path):
    small_set(tmp_path / "set")
    (planned,) = plan(EvalSettings(tasks="retrieval", data=str(tmp_path)))
    assert planned.rows == [{"id": "1", "query": "where do bees live", "relevant": {"a": 2, "b": 0}}]
    assert (planned.corpus.ids, planned.corpus.texts) == (["a", "b"], ["Bees live in hives", "Ships sail"])
    assert str(planned) == "retrieval (1 query, 2 documents)"


def drop(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def write_judgments(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "qrels" / "test.tsv").write_text(text)


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (drop("corpus.jsonl"), "no retrieval sets in"),
        (drop("queries.jsonl"), "has no queries.jsonl"),
        (drop("qrels/test.tsv"), "has no qrels/test.tsv"),
        (write_judgments("1\tc\t1\n"), "`c` is no id in corpus.jsonl"),
        (write_judgments("3\ta\t1\n"), "`3` is no id in queries.jsonl"),
        (write_judgments("1\ta\t0\n"), "judges no document as relevant"),
        (write_judgments("1\ta\t1\n1 b 1\n"), "no judgement"),
        (lambda folder: lines(folder / "corpus.jsonl", [{"_id": "a", "text": "x"}] * 2), "`a` is the id of two rows"),
        (lambda folder: lines(folder / "corpus.jsonl", [{"_id": "a", "text": " "}]), "a text without anything in it"),
        (lambda folder: lines(folder / "corpus.jsonl", [{"text": "x"}]), "no `_id` with a `text`"),
    ],
)
def test_a_set_that_is_wrong_is_refused(tmp_path, edit, why):
    edit(small_set(tmp_path / "set"))
    with pytest.raises(BadInput, match=why):
        plan(EvalSettings(tasks="retrieval", data=str(tmp_path / "set")))


SCORED = [{"sentence1": "a boat", "sentence2": "a ship", "score": 5}, {"sentence1": "a boat", "sentence2": "an idea", "score": 0.5}]


@pytest.mark.parametrize(
    ("task", "rows", "words", "why"),
    [
        ("sts", [SCORED[0]], {}, "every `score` of .* is 5"),
        ("sts", [SCORED[0] | {"score": "high"}, SCORED[1]], {}, "`score` should be a number"),
        ("sts", [SCORED[0], SCORED[1] | {"sentence2": " "}], {}, "`sentence2` should be a text with something in it"),
        ("sts", SCORED, {"against": "other.jsonl"}, "the figures of sts are of all rows together"),
        ("sts", SCORED, {"chat": True}, "sts compares vectors"),
        ("sts", SCORED, {"query_prompt": "query: "}, "sts has neither queries nor documents"),
        ("pairs", SCORED, {}, "no field `label`"),
        ("pairs", [SCORED[0] | {"label": True}, SCORED[1] | {"label": 0}], {}, "`label` should be 0 or 1"),
    ],
)
def test_pairs_that_are_wrong_are_refused(tmp_path, task, rows, words, why):
    path = lines(tmp_path / f"{task}.jsonl", rows)
    with pytest.raises(UserError, match=why):
        plan(EvalSettings(tasks=task, data=str(path), **words))


# ---------------------------------------------------------------- a model


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Path:
    """A small random BERT with a real vocabulary."""
    folder, vocabulary = tmp_path_factory.mktemp("encoder"), str(shared("tokenizers/bert_uncased_vocab.txt"))
    sizes = {"vocab": 30522, "width": 32, "ffn": 64, "layers": 2, "heads": 4, "context": 64}
    config = FAMILIES["bert"](**sizes)
    LM(config, random_model(config, 0).module, find_tokenizer(vocabulary)).save(folder)
    steps = EmbeddingSteps("mean", normalize=True, prompts={"query": "query: ", "passage": "passage: "})
    write_steps(folder, steps, config.width)
    return folder


def test_a_model_on_pairs_and_a_search(encoder, tmp_path, capsys):
    """The figures from vectors of `lm.embed`, computed with scipy and by hand."""
    texts = ["A man is eating food.", "A man eats something.", "The ship sails at dawn.", "A cat sleeps.", "Prices rose by 3 %."]
    pairs = [(i, j) for j in range(len(texts)) for i in range(j)]
    rows = [{"sentence1": texts[i], "sentence2": texts[j], "score": (i + 2 * j) % 5} for i, j in pairs]
    lines(tmp_path / "sts.jsonl", rows)
    small_set(tmp_path / "set")
    lines(tmp_path / "pairs.jsonl", [{**row, "label": int(row["score"] > 2)} for row in rows])
    assert main(["eval", str(encoder), "tasks=sts,retrieval,pairs", f"data={tmp_path}", "--json"]) == 0
    tasks, lm = json.loads(capsys.readouterr().out)["tasks"], load(encoder)
    vectors = dict(zip(texts, lm.embed(texts).astype(np.float64)))
    cosines = [vectors[row["sentence1"]] @ vectors[row["sentence2"]] for row in rows]
    assert tasks["sts"]["spearman"] == pytest.approx(stats.spearmanr(cosines, [row["score"] for row in rows]).statistic, abs=1e-6)
    assert tasks["sts"]["pearson"] == pytest.approx(stats.pearsonr(cosines, [row["score"] for row in rows]).statistic, abs=1e-5)
    assert (tasks["sts"]["n"], tasks["sts"]["stderr"]) == (10, None)
    assert (tasks["pairs"]["ap"], tasks["pairs"]["n"]) == (pytest.approx(precision(cosines, rows)), 10)
    query = lm.embed(["where do bees live"], prompt_name="query")[0]
    bees, ships = lm.embed(["Bees live in hives", "Ships sail"], prompt_name="passage") @ query
    second = 1 / np.log2(3)
    assert tasks["retrieval"]["ndcg_at_10"] == pytest.approx(1 if bees > ships else second)
    assert (tasks["retrieval"]["recall_at_1"], tasks["retrieval"]["recall_at_10"]) == (float(bees > ships), 1)


def precision(cosines: list[float], rows: list[dict[str, Any]]) -> float:
    """The mean of the precision at each pair with label 1, the likeliest first."""
    order = np.argsort(cosines)[::-1]
    right = np.array([rows[i]["score"] > 2 for i in order])
    return float((np.cumsum(right) / np.arange(1, len(right) + 1))[right].mean())


def test_vectors_that_are_not_finite_are_an_error(encoder, tmp_path, capsys, monkeypatch):
    """Their order would be the file's, and their figures perfect."""
    small_set(tmp_path / "set")
    monkeypatch.setattr(measures.SentenceEncoder, "pooled", lambda self, rows: np.full((len(rows), 32), np.nan, np.float32))
    assert main(["eval", str(encoder), "tasks=retrieval", f"data={tmp_path / 'set'}"]) == 1
    assert "numbers that are not finite" in capsys.readouterr().err


def test_texts_that_are_cut_are_counted(encoder, tmp_path, capsys):
    long = "a ship sails " * 40
    lines(tmp_path / "sts.jsonl", [SCORED[0], SCORED[1] | {"sentence2": long}, {"sentence1": long, "sentence2": "a", "score": 3}])
    assert main(["eval", str(encoder), "tasks=sts", f"data={tmp_path}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tasks"]["sts"]["truncated"] == 1


def test_searches_of_two_models_are_compared_query_by_query(encoder, tmp_path, capsys):
    small_set(tmp_path)
    assert main(["eval", str(encoder), "tasks=retrieval", f"data={tmp_path}", f"rows={tmp_path}/rows.jsonl"]) == 0
    capsys.readouterr()
    words = [f"data={tmp_path}", f"against={tmp_path}/rows.jsonl", "--json"]
    assert main(["eval", str(encoder), "tasks=retrieval", *words]) == 0
    task = json.loads(capsys.readouterr().out)["tasks"]["retrieval"]
    assert task["against"]["ndcg_at_10"]["difference"] == 0


def test_prompts_of_queries_and_documents_are_honoured(encoder, tmp_path, monkeypatch):

    model = load(encoder)
    small_set(tmp_path / "set")
    seen: list[Any] = []
    original = measures.SentenceEncoder.ids

    def ids(self: Any, texts: Any, *args: Any, prompt: Any = None, **options: Any) -> Any:
        seen.append((texts[0], prompt))
        return original(self, texts, *args, prompt=prompt, **options)

    monkeypatch.setattr(measures.SentenceEncoder, "ids", ids)
    for words, query, document in (({}, "query: ", "passage: "), ({"query_prompt": "", "document_prompt": "doc: "}, "", "doc: ")):
        settings = EvalSettings(tasks="retrieval", data=str(tmp_path / "set"), **words)
        measures.evaluate_retrieval(model, plan(settings)[0], settings, lambda done: None)
        assert set(seen) == {("Bees live in hives", document), ("where do bees live", query)}
        seen.clear()


def test_a_model_without_vectors_is_refused(tmp_path, capsys):
    lines(tmp_path / "sts.jsonl", SCORED)
    assert main(["eval", str(shared("models/stories260k")), "tasks=sts", f"data={tmp_path}"]) == 2
    assert "predicts tokens and is not an encoder" in capsys.readouterr().err


def test_progress_grows_to_the_number_of_rows(encoder, tmp_path):
    """Ten queries and twenty documents: a document counts as much as a query."""
    queries = [{"_id": str(i), "text": f"query {i}"} for i in range(10)]
    lines(tmp_path / "queries.jsonl", queries)
    lines(tmp_path / "corpus.jsonl", [{"_id": str(i), "title": "", "text": f"document {i}"} for i in range(20)])
    (tmp_path / "qrels").mkdir()
    relevant = "".join(f"{i}\t{i}\t1\n" for i in range(10))
    (tmp_path / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + relevant, encoding="utf-8")
    settings, seen = EvalSettings(tasks="retrieval", data=str(tmp_path), batch=32), list[int]()
    measures.evaluate_retrieval(load(encoder), plan(settings)[0], settings, seen.append)
    assert seen == sorted(seen)
    assert len(seen) > 4
    assert seen[-1] == 10
