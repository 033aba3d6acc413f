"""The labels of files: which classes they are, what becomes of them, and what is refused."""

import json

import numpy as np
import pytest

from argosy.core.errors import BadInput
from argosy.data.encoding import Encoding
from argosy.data.framing import TextFrame, frame_ids, frame_of
from argosy.data.labels import LabelSet, label_numbers, labels_of_source
from argosy.data.pack import Corpus
from argosy.data.pipeline import build, find
from argosy.data.prepare import prepare
from argosy.data.rows.labeled import LabeledRows
from argosy.data.settings import DataSettings
from argosy.data.tables import check_prepared
from argosy.data.tokenizers.load import load_tokenizer
from argosy.train.objectives.texts.classify import Classify
from argosy.train.objectives.texts.contrastive import Contrastive


def write_labels(path, labels, **columns):
    rows = [{"text": f"text {i}", "label": label} | columns for i, label in enumerate(labels)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataSettings(source=str(path), held_out=0)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["b", "a", "b"], LabelSet(("a", "b"), "single_label_classification", {"a": 1, "b": 2})),
        ([1, 1, 0], LabelSet(("LABEL_0", "LABEL_1"), "single_label_classification", {"LABEL_0": 1, "LABEL_1": 2})),
        ([True, False], LabelSet(("LABEL_0", "LABEL_1"), "single_label_classification", {"LABEL_0": 1, "LABEL_1": 1})),
        ([0.5, -2.0], LabelSet((), "regression")),
        ([["y", "x"], [], ["x"]], LabelSet(("x", "y"), "multi_label_classification", {"x": 2, "y": 1})),
        ([[], [1]], LabelSet(("LABEL_0", "LABEL_1"), "multi_label_classification", {"LABEL_0": 0, "LABEL_1": 1})),
        ([[0.0, 1.0, 0.5]], LabelSet(("LABEL_0", "LABEL_1", "LABEL_2"), "multi_label_classification")),
    ],
)  # fmt: skip
def test_the_labels_of_a_file(tmp_path, labels, expected):
    assert labels_of_source(write_labels(tmp_path / "f.jsonl", labels)) == expected
    assert expected.scores == (len(expected.names) or 1)


@pytest.mark.parametrize(
    ("labels", "why"),
    [
        (["a", 1], "a label that is a class, after labels that are a name"),
        ([["a"], "a"], "a label that is a name, after labels that are names"),
        (["a", "a"], "every record has the label a"),
        ([{"x": 1}], "`label` is"),
        ([-1], "`label` is -1"),
        ([["a", 1]], "`label` is"),
    ],
)
def test_labels_that_are_refused(tmp_path, labels, why):
    with pytest.raises(BadInput, match=why):
        labels_of_source(write_labels(tmp_path / "f.jsonl", labels))


def test_labels_become_numbers():
    names = ("a", "b", "c")
    assert label_numbers("b", names, "") == [1.0]
    assert label_numbers(2, names, "") == [2.0]
    assert label_numbers(["c", "a"], names, "") == label_numbers([2, 0], names, "") == [1.0, 0.0, 1.0]
    assert label_numbers([0.0, 1.0, 0.25], names, "") == [0.0, 1.0, 0.25]
    assert label_numbers(2.5, (), "") == [2.5]
    for raw, why in (("d", "unknown class `d`"), (3, "class 3, and there are 3 classes"), (0.5, "where classes are learned")):
        with pytest.raises(BadInput, match=why):
            label_numbers(raw, names, "f:1")
    with pytest.raises(BadInput, match="where numbers are learned"):
        label_numbers("a", (), "f:1")


def test_frames_are_those_of_the_tokenizers_library(tmp_path):
    """BERT's and RoBERTa's processors, given one text and two, with room and without."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {word: i for i, word in enumerate(["<s>", "</s>", "[CLS]", "[SEP]", *"abcdefghij"])}
    frames = {"bert": (TextFrame((2,), (3,), (3,)), processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2)))}
    frames["roberta"] = (TextFrame((0,), (1, 1), (1,)), processors.RobertaProcessing(("</s>", 1), ("<s>", 0)))
    for frame, processor in frames.values():
        reference = Tokenizer(models.WordLevel(words, unk_token="a"))
        reference.pre_tokenizer, reference.post_processor = pre_tokenizers.Whitespace(), processor
        first_text, two = "a b c d e f", "g h i j"
        ids = [reference.encode(text, add_special_tokens=False).ids for text in (first_text, two)]
        for most in (20, 12, 11, 10, 9, 8):
            reference.enable_truncation(most)
            assert frame_ids(frame, ids[0], None, most)[0] == reference.encode(first_text).ids
            tokens, second = frame_ids(frame, ids[0], ids[1], most)
            assert len(tokens) <= most
            assert tokens[:second] + tokens[second:] == tokens
            if most >= 11 or len(ids[0]) + len(ids[1]) + 4 <= most:
                assert tokens == reference.encode(first_text, two).ids


def test_rows_hold_labels_and_where_second_texts_begin(tmp_path):
    path = tmp_path / "pairs.jsonl"
    rows = [
        {"text": "ab", "text_pair": "cde", "label": ["x"]},
        {"text": "a much longer text than a row holds", "label": []},
        {"text": "", "label": ["y"]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {"format": "classification", "labels": ["x", "y"], "held_out": 0, "sequence": 8, "batch": 2, "shuffle": False}
    settings = DataSettings(source=str(path), cache=str(tmp_path / "cache"), **fields)
    batches = build(settings, load_tokenizer("byte"), vocab=258, seed=0, fields=Classify().reads())
    batch = next(batches)
    assert batches.sizes == {"s": 1, "z": 2}
    assert batch["label"].tolist() == [[[1.0, 0.0]], [[0.0, 0.0]]]
    assert batch["second"].tolist() == [[2.0], [0.0]]
    assert batch["tokens"][0].tolist() == [*b"abcde", 0, 0, 0]
    assert batch["tokens"][1].tolist() == [*b"a much l"]
    assert batch["segments"].sum(1).tolist() == [5, 8]
    text = batches.summary().text
    assert "1 example without a word" in text
    assert "Cut: 1 example longer than a row of 8" in text
    batches.close()


def test_a_negative_that_a_record_lacks_has_an_empty_slot(tmp_path):
    path, some = tmp_path / "n.jsonl", [["n1", "n2", "n3"], [], ["m1"]]
    rows = [{"anchor": f"a{i}", "positive": f"p{i}", "negatives": each} for i, each in enumerate(some)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings_fields = {"negatives": 2, "held_out": 0, "sequence": 6, "shuffle": False, "cache": str(tmp_path / "cache")}
    fields = Contrastive(negatives=2).reads()
    together = {"vocab": 258, "seed": 0, "fields": fields, "rows_per_group": 4}
    batches = build(DataSettings(source=str(path), batch=12, **settings_fields), load_tokenizer("byte"), **together)
    batch = next(batches)
    texts = [bytes(tokens[segments > 0].tolist()).decode() for tokens, segments in zip(batch["tokens"], batch["segments"])]
    assert texts == ["a0", "p0", "n1", "n2", "a1", "p1", "", "", "a2", "p2", "m1", ""]
    assert batch["live"][:, 0].tolist() == [float(bool(text)) for text in texts]
    assert "1 negative beyond those of a record (data.negatives)" in batches.summary().text
    assert "3 negatives that records lack: empty places, computed all the same" in batches.summary().text
    assert "3 examples" in batches.summary().text
    batches.close()
    batches = build(DataSettings(source=str(path), batch=4, packing="fit", **settings_fields), load_tokenizer("byte"), **together)
    batch = next(batches)
    assert batch["live"].tolist() == [[1, 1, 1], [1, 1, 1], [1, 0, 1], [1, 0, 0]]
    assert batch["segments"].tolist()[2:] == [[1, 1, 3, 3, 0, 0], [1, 1, 0, 0, 0, 0]]
    batches.close()


def test_each_column_has_its_prompt_and_its_length(tmp_path):
    """Blanks around a text are left out, as where it is embedded."""
    path = tmp_path / "n.jsonl"
    rows = [{"anchor": "a \n", "positive": " p", "negatives": ["n", "m\t"]}, {"anchor": "b", "positive": "", "negatives": ["n"]},
            {"anchor": "b", "positive": "q", "negatives": []}]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings_fields = {
        "negatives": 2,
        "held_out": 0,
        "sequence": 8,
        "shuffle": False,
        "cache": str(tmp_path / "cache"),
        "batch": 8,
        "bos": True,
    }
    settings = DataSettings(source=str(path), prompts={"anchor": "q: ", "negative": "d:"}, **settings_fields)
    fields = Contrastive(negatives=2, include_prompt=False).reads()
    batches = build(settings, load_tokenizer("byte"), vocab=258, seed=0, fields=fields, rows_per_group=4)
    batch = next(batches)
    texts = [bytes(token for token in row.tolist() if 0 < token < 256).decode() for row in batch["tokens"]]
    assert texts == ["q: a", "p", "d:n", "d:m", "q: b", "q", "", ""]
    assert batch["prompt_length"][:, 0].tolist() == [4, 0, 3, 3, 4, 0, 0, 0]
    assert "1 example without a word" in batches.summary().text
    batches.close()
    conversation = tmp_path / "c.jsonl"
    conversation.write_text('{"text": "a"}\n')
    with pytest.raises(BadInput, match="is for texts that become vectors, and this data is `text`"):
        build(settings.model_copy(update={"source": str(conversation)}), load_tokenizer("byte"), vocab=258, seed=0)


def test_what_is_held_out_are_whole_records(tmp_path):
    path = tmp_path / "n.jsonl"
    rows = [{"anchor": f"a{i}", "positive": f"p{i}", "negatives": [f"n{i}"] * (i % 4)} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = DataSettings(source=str(path), negatives=3, held_out=0.3)
    prepared = prepare(find(settings), Encoding.of_settings(load_tokenizer("byte"), settings), tmp_path / "made", held_out=0.3)
    assert not prepared.train.documents % 5
    assert not prepared.held_out.documents % 5
    assert prepared.train.documents + prepared.held_out.documents == 200
    assert prepared.held_out.documents
    check_prepared(prepared, settings)
    with pytest.raises(BadInput, match=r"prepared with data\.negatives=3, not 2"):
        check_prepared(prepared, settings.model_copy(update={"negatives": 2}))


def test_a_text_that_is_cut_keeps_its_last_tokens():
    """[SEP] stays, as when the model is used."""
    tokens, closing = np.array([256, *b"abcdefgh", 257, 256, *b"b", 257], np.uint16), np.ones(2, np.float32)
    values = {"closing": closing, "second": 0 * closing, "label_0": np.array([0, 1], np.float32)}
    batch = LabeledRows(Corpus(tokens, np.array([0, 10, 13]), values=values), 1, 5).gather(np.arange(2))
    assert batch["tokens"].tolist() == [[256, *b"abc", 257], [256, *b"b", 257, 0, 0]]
    assert batch["label"].tolist() == [[[0.0]], [[1.0]]]


def test_the_frame_of_a_byte_tokenizer_is_its_beginning():
    byte = load_tokenizer("byte")
    assert frame_of(byte, bos=True) == TextFrame((byte.bos,), (byte.bos,), ())
    assert frame_of(byte, bos=False) == TextFrame()
