"""Functions that records pass, documents that occur before, and data sets of the Hub."""

import json
import random
import re
import sys

import data_files
import pytest
from helpers import free_port
from test_prepare import Bytes

from argosy.core.errors import BadInput, Damaged, UserError
from argosy.data.pipeline import build, find
from argosy.data.settings import DataSettings
from argosy.data.sources import Document, Source
from argosy.data.sources.duplicates import near_keys, signature
from argosy.data.sources.find import find_source

FUNCTIONS = """
LIMIT = 3

def asked(row):
    return {"prompt": f"Q: {row['q']}", "completion": row["a"]}

def twice(row):
    return [row, {**row, "text": row["text"].upper()}]

def some(row):
    return None if row["id"] % 2 else row

def short(row):
    return len(row["text"].split()) <= LIMIT

def fails(row):
    return row["nothing"]

def wrong(row):
    return 3
"""
ROWS = [
    {"text": " ".join(["w"] * (number % 5 + 1)) + str(number), "id": number, "q": f"{number}?", "a": str(number)}
    for number in range(20)
]


@pytest.fixture
def files(tmp_path):
    (tmp_path / "f.py").write_text(FUNCTIONS)
    (tmp_path / "a.jsonl").write_bytes(data_files.jsonl(ROWS))
    (tmp_path / "a.parquet").write_bytes(data_files.parquet(ROWS))
    return tmp_path


def source_of(files, name="a.jsonl", **fields) -> Source:
    fields = {key: f"{files}/f.py:{value}" if key in ("map", "filter") else value for key, value in fields.items()}
    source = find_source(DataSettings(source=str(files / name), **fields))
    assert isinstance(source, Source)
    return source


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_records_pass_the_map_and_then_the_filter(files, name):
    texts = [row["text"] for row in ROWS]
    assert [d.text for d in source_of(files, name, filter="short").documents()] == [t for t in texts if len(t.split()) <= 3]
    assert [d.text for d in source_of(files, name, map="some").documents()] == texts[::2]
    both = [d.text for d in source_of(files, name, map="twice", filter="short").documents()]
    assert both == [t for text in texts for t in (text, text.upper()) if len(t.split()) <= 3]
    source = source_of(files, name, map="asked")
    assert source.format == "completion"
    assert [(d.record.prompt, d.record.completion) for d in source.documents()] == [(f"Q: {n}?", str(n)) for n in range(20)]


def test_a_folder_and_a_mixture_pass_them_too(files):
    assert len(list(source_of(files, "a.*", map="some").documents())) == 20
    settings = DataSettings(source=[{"path": str(files / "a.jsonl"), "filter": f"{files}/f.py:short"}, str(files / "a.parquet")])
    assert [len(list(part.source.documents())) for part in find(settings).parts] == [12, 20]


def test_a_run_does_not_go_on_with_another_function(files):
    fields = {"cache": str(files / "cache"), "sequence": 8, "batch": 2, "held_out": 0}
    settings = DataSettings(source=str(files / "a.jsonl"), map=f"{files}/f.py:some", **fields)
    state = build(settings, Bytes(), vocab=258, seed=0).state()
    (files / "f.py").write_text(FUNCTIONS.replace("% 2", "% 3"))
    with pytest.raises(UserError, match=r"source\.map was some"):
        build(settings, Bytes(), vocab=258, seed=0).restore(state)


@pytest.mark.parametrize(("fields", "says", "where"), [
    ({"map": "fails"}, "f.py:fails failed: KeyError: 'nothing'", "a.jsonl:1"),
    ({"map": "wrong"}, "f.py:wrong returned int", "a.jsonl:1"),
    ({"filter": "shirt"}, "unknown data.filter `", ""),
    ({"map": "LIMIT"}, "`LIMIT` of `", "data.map="),
])  # fmt: skip
def test_a_function_that_does_not_work_is_named_with_the_record(files, fields, says, where):
    with pytest.raises(UserError) as caught:
        list(source_of(files, **fields).documents())
    assert says in caught.value.what
    assert where in str(caught.value.where)


def test_functions_that_would_be_ignored_are_refused(files):
    (files / "t.txt").write_text("a text")
    for fields in ({"source": f"{files}/t.txt", "map": f"{files}/f.py:some"}, {"source": "synthetic", "deduplicate": "exact"}):
        with pytest.raises(BadInput, match=r"data\.map and data\.filter are for records|data\.deduplicate is for documents"):
            find_source(DataSettings(**fields))
    for of in ("f.py", "gone.py:f", "module:f"):
        with pytest.raises(BadInput, match=r"names no function|no file"):
            list(find_source(DataSettings(source=f"{files}/a.jsonl", map=of)).documents())


def test_exact_duplicates_are_left_out_and_counted(files):
    rows = [{"text": f"text {number % 7}"} for number in range(30)]
    (files / "d.jsonl").write_bytes(data_files.jsonl(rows))
    source = source_of(files, "d.jsonl", deduplicate="exact")
    assert [d.text for d in source.documents()] == [f"text {number}" for number in range(7)]
    assert source.duplicates == 23
    settings = DataSettings(source=f"{files}/d.jsonl", deduplicate="exact", cache=str(files / "cache"), sequence=8, batch=2, held_out=0)
    summary = build(settings, Bytes(), vocab=258, seed=0).summary()
    assert summary.duplicates == 23
    assert "23 documents that occur before (data.deduplicate)" in summary.text


def overlap(first: list[str], second: list[str]) -> float:
    grams = [{tuple(words[at : at + 5]) for at in range(len(words) - 4)} for words in (first, second)]
    return len(grams[0] & grams[1]) / len(grams[0] | grams[1])


def test_near_duplicates_are_found_as_often_as_the_overlap_says():
    """Against the overlap that sets give, and the probability that bands of MinHash have for it."""
    draw, buckets = random.Random(5), {}
    for _ in range(400):
        words = [str(draw.randrange(10_000)) for _ in range(200)]
        other = list(words)
        for _ in range(draw.choice([1, 4, 12, 40])):
            other[draw.randrange(200)] = "changed"
        near = not set(near_keys(Document(" ".join(words)))).isdisjoint(near_keys(Document(" ".join(other))))
        share = overlap(words, other)
        expected = 1 - (1 - share**8) ** 14
        bucket = buckets.setdefault(round(share * 5), [0, 0.0, 0])
        bucket[0], bucket[1], bucket[2] = bucket[0] + near, bucket[1] + expected, bucket[2] + 1
        assert abs((signature(" ".join(words)) == signature(" ".join(other))).mean() - share) < 0.25
    assert len(buckets) >= 4
    for hits, expected, count in buckets.values():
        assert abs(hits - expected) < 4 * (count * 0.25) ** 0.5
    same = near_keys(Document("The  same words, and more of them."))
    assert same == near_keys(Document("the same WORDS and more of them"))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("rows/gone.jsonl", "no file `rows/gone.jsonl`"),
        ("./gone", "no folder `./gone`"),
        ("rows/of/gone", "no folder `rows/of/gone`"),
        ("rows/one.jsonl", "`rows/one.jsonl` is a file"),
        ("gone/gone", "`gone/gone` is not in the cache, and the Hub cannot be reached"),
    ],
)
@pytest.mark.parametrize("online", [False, True])
def test_a_path_after_hf_is_no_wait_for_the_network(tmp_path, monkeypatch, name, why, online):
    from huggingface_hub import constants

    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "one.jsonl").write_text('{"text": "one"}\n')
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    # The attempts of `datasets` take half a minute.
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("it waits"))
    with pytest.raises(BadInput, match=re.escape(why)) as caught:
        list(find_source(DataSettings(source=f"hf:{name}", online=online)).documents())
    assert "data.source=" in str(caught.value.hint)
    assert not constants.HF_HUB_OFFLINE


def test_data_sets_of_the_hub_from_folders_in_its_layout(tmp_path, monkeypatch):
    """A folder of files named by split, and what `save_to_disk` writes; as in `datasets` itself."""
    import datasets

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hub"))
    datasets.disable_progress_bars()
    folder = tmp_path / "set"
    folder.mkdir()
    for split, count in (("train", 30), ("test", 7)):
        rows = [{"text": f"{split} {number}", "tags": ["a", None]} for number in range(count)]
        (folder / f"{split}.jsonl").write_bytes(data_files.jsonl(rows))
    loaded = datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "hub"))
    for spec, split in ((folder, "train"), (f"{folder}:test", "test"), (f"{folder}:default:test", "test")):
        source = find_source(DataSettings(source=f"hf:{spec}"))
        assert [d.text for d in source.documents()] == list(loaded[split]["text"])
        assert source.ignored == ("tags",)
        assert source.fingerprint() == find_source(DataSettings(source=f"hf:{spec}")).fingerprint()
    loaded.save_to_disk(str(tmp_path / "saved"))
    loaded["test"].save_to_disk(str(tmp_path / "one"))
    assert [d.text for d in find_source(DataSettings(source=f"hf:{tmp_path}/saved:test")).documents()] == list(loaded["test"]["text"])
    assert len(list(find_source(DataSettings(source=f"hf:{tmp_path}/one")).documents())) == 7
    # The same folder is read without `datasets`, as Arrow files.
    assert [d.text for d in find_source(DataSettings(source=f"{tmp_path}/one")).documents()] == list(loaded["test"]["text"])
    with pytest.raises(BadInput, match="has no split `tset`") as caught:
        list(find_source(DataSettings(source=f"hf:{folder}:tset")).documents())
    assert "did you mean `test`" in str(caught.value.hint)
    with pytest.raises(BadInput, match="`gone/gone` is not in the cache, and the Hub cannot be reached"):
        list(find_source(DataSettings(source="hf:gone/gone")).documents())
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BadInput, match="package datasets, which is not installed"):
        list(find_source(DataSettings(source=f"hf:{folder}")).documents())


def hub_rows(folder, count, first=0):
    folder.mkdir(exist_ok=True)
    for number in range(3):
        rows = [{"text": f"row {first + 1000 * number + i} of a text", "tags": ["a"]} for i in range(count)]
        (folder / f"train-{number}.jsonl").write_bytes(data_files.jsonl(rows))
    return folder


def test_a_stream_of_the_hub_has_the_rows_of_the_data_set_and_keeps_nothing(tmp_path, monkeypatch):
    """Longer than a batch of Arrow, in several files."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hub"))
    folder = hub_rows(tmp_path / "set", 700)
    streamed = find_source(DataSettings(source=f"hf:{folder}", online=True))
    texts = [document.text for document in streamed.documents()]
    assert not list((tmp_path / "hub").rglob("*.arrow"))
    whole = find_source(DataSettings(source=f"hf:{folder}"))
    assert texts == [document.text for document in whole.documents()]
    assert len(set(texts)) == 2100
    assert streamed.ignored == ("tags",)
    again = find_source(DataSettings(source=f"hf:{folder}", online=True))
    assert again.fingerprint() == streamed.fingerprint() != whole.fingerprint()
    with pytest.raises(BadInput, match="has no split `tset`"):
        list(find_source(DataSettings(source=f"hf:{folder}:tset", online=True)).documents())
    hub_rows(folder, 700, first=5)
    assert find_source(DataSettings(source=f"hf:{folder}", online=True)).fingerprint() != streamed.fingerprint()
    with (folder / "train-2.jsonl").open("ab") as file:
        file.write(b'{"text": ')
    with pytest.raises(Damaged, match="the stream of the data set ended"):
        list(find_source(DataSettings(source=f"hf:{folder}", online=True)).documents())


def test_a_stream_of_the_hub_resumes_at_any_row(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hub"))
    settings = DataSettings(source=f"hf:{hub_rows(tmp_path / 'set', 40)}", online=True, sequence=16, batch=4)
    stream = build(settings, Bytes(), vocab=258, seed=0)
    states, rows = [], []
    for _ in range(12):
        states.append(json.loads(json.dumps(stream.state())))
        rows.append(next(stream)["tokens"])
    stream.close()
    for at in (11, 3, 7):
        other = build(settings, Bytes(), vocab=258, seed=0)
        other.restore(states[at])
        for row in rows[at:]:
            assert (next(other)["tokens"] == row).all()
        other.close()


def test_a_data_set_of_the_hub_resumes(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hub"))
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.csv").write_bytes(data_files.csv_file([{"body": f"row {number}"} for number in range(50)]))
    settings = DataSettings(source=f"hf:{tmp_path}/set", columns={"text": "body"}, cache=str(tmp_path / "cache"), sequence=16, batch=4)
    stream = build(settings, Bytes(), vocab=258, seed=0)
    next(stream)
    state = json.loads(json.dumps(stream.state()))
    tokens = next(stream)["tokens"]
    other = build(settings, Bytes(), vocab=258, seed=0)
    other.restore(state)
    assert (next(other)["tokens"] == tokens).all()
