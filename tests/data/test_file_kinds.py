"""The same rows in a file of every kind give the same tokens; damaged, truncated and empty files are named with file and row."""

import json
import random
import struct
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import data_files
import fsspec
import numpy as np
import pytest
from data_files import KINDS
from test_prepare import Bytes

from argosy.core.command import install_extra
from argosy.core.errors import ArgosyError, BadInput, Damaged
from argosy.core.formats.crc32c import crc32c
from argosy.data.encoding import Encoding
from argosy.data.prepare import prepare
from argosy.data.settings import DataSettings
from argosy.data.sources import Source, opening
from argosy.data.sources.find import find_source

WORDS = ["the", "a", "Ünïcode", "漢字", "line\nbreak", "comma,", 'quote"', "semi;", "tab\t", "0", "17", "3.5", "null", "true"]


def rows_of(count: int = 500) -> list[dict]:
    draw = random.Random(7)
    return [{"text": " ".join(draw.choices(WORDS, k=draw.randint(1, 30))), "id": number} for number in range(count)]


def source_of(path, **fields) -> Source:
    source = find_source(DataSettings(source=str(path), **fields))
    assert isinstance(source, Source)
    return source


def texts(path, **fields) -> list[str]:
    return [document.text for document in source_of(path, **fields).documents()]


def tokens_of(source: Source, folder: Path, held_out: float = 0.1) -> tuple:
    corpus = prepare(source, Encoding(Bytes()), folder, held_out=held_out)
    return tuple(tuple(split.tokens.tolist()) for split in (corpus.train, corpus.held_out))


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> tuple:
    folder = tmp_path_factory.mktemp("expected")
    (folder / "rows.jsonl").write_bytes(data_files.jsonl(rows_of()))
    return tokens_of(source_of(folder / "rows.jsonl"), folder / "made")


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_gives_the_same_tokens(tmp_path, expected, name):
    path = tmp_path / name
    path.write_bytes(KINDS[name](rows_of()))
    assert texts(path) == [row["text"] for row in rows_of()]
    assert tokens_of(source_of(path), tmp_path / "made") == expected


@pytest.mark.parametrize("kind", ["example", "json", "text"])
def test_array_records_give_the_same_tokens(tmp_path, expected, kind):
    make = {"example": data_files.example, "json": lambda row: json.dumps(row).encode(), "text": lambda row: row["text"].encode()}
    data_files.array_record(tmp_path / "rows.array_record", [make[kind](row) for row in rows_of()])
    assert tokens_of(source_of(tmp_path / "rows.array_record"), tmp_path / "made") == expected


def test_files_of_token_ids_give_the_same_tokens(tmp_path, monkeypatch):
    """Bytes are the tokens here, 257 their end of sequence."""
    monkeypatch.setattr("argosy.data.sources.token_files.PIECE_TOKENS", 100)
    (tmp_path / "rows.jsonl").write_bytes(data_files.jsonl(rows_of()))
    whole = tokens_of(source_of(tmp_path / "rows.jsonl"), tmp_path / "whole", 0)
    documents, eos = [list(row["text"].encode()) for row in rows_of()], Bytes().eos
    data_files.megatron(tmp_path / "a.bin", documents)
    data_files.megatron(tmp_path / "wide.bin", documents, "<i4", 4)
    nano = np.array([token for ids in documents for token in (*ids, eos)], "<u2")
    (tmp_path / "nano.bin").write_bytes(nano.tobytes())
    first = np.array([token for ids in documents for token in (eos, *ids)], "<u2")
    (tmp_path / "llm.bin").write_bytes(struct.pack("<3i", 20240520, 1, len(first)).ljust(1024, b"\0") + first.tobytes())
    for number, name in enumerate(("a.bin", "wide.bin", "a.idx", "nano.bin", "llm.bin")):
        # What is held out depends on the document, whose ids are hashed here and its text elsewhere.
        assert tokens_of(source_of(tmp_path / name), tmp_path / f"made{number}", 0) == whole, name


def test_an_id_outside_the_vocabulary_is_refused(tmp_path):
    (tmp_path / "gpt2.bin").write_bytes(np.array([1, 2, 50256], "<u2").tobytes())
    with pytest.raises(BadInput, match="token 50256 is outside the tokenizer's vocabulary") as caught:
        tokens_of(source_of(tmp_path / "gpt2.bin"), tmp_path / "made")
    assert "data.tokenizer=" in str(caught.value.hint)


@pytest.mark.parametrize("name", KINDS)
def test_a_truncated_file_is_named(tmp_path, name):
    data = KINDS[name](rows_of(300))
    for share in (0.35, 0.8):
        path = tmp_path / name
        path.write_bytes(data[: int(len(data) * share)])
        with pytest.raises(ArgosyError) as caught:
            texts(path)
        assert str(path) in str(caught.value)
        assert len(str(caught.value).splitlines()) <= 5


SUMMED = ("tfrecord", ".gz", "bz2", "xz", "jsonl", "checked.parquet")
FLIPPED = {name: make for name, make in KINDS.items() if name.endswith(("arrow", "parquet", "zst", *SUMMED)) and name != "rows.jsonl"}
FLIPPED["checked.parquet"] = partial(data_files.parquet, write_page_checksum=True)


@pytest.mark.parametrize("name", FLIPPED)
def test_flipped_bytes_are_an_error_or_change_nothing(tmp_path, name):
    """Where a file has checksums: Arrow files have none, Parquet and Zstandard files if their writer was asked for them."""
    rows = rows_of(300)
    data = FLIPPED[name](rows)
    draw = random.Random(3)
    path = tmp_path / name
    for _ in range(12):
        wrong = bytearray(data)
        wrong[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(wrong)
        try:
            contents = texts(path)
        except ArgosyError as error:
            contents = str(error)
        if isinstance(contents, str):
            assert str(path) in contents
        else:
            assert contents == [row["text"] for row in rows] or not name.endswith(SUMMED)


@pytest.mark.parametrize("name", [name for name in KINDS if name not in ("rows", "parquet.txt")])
def test_an_empty_file_is_named(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"")
    with pytest.raises(ArgosyError) as caught:
        tokens_of(source_of(path), tmp_path / "made")
    assert str(path) in str(caught.value)


def test_a_row_is_named(tmp_path):
    rows = [{"text": "good"}] * 9 + [{"text": None}]
    for name, where in {"a.parquet": "row 9", "a.arrow": "row 9", "a.csv": ":12"}.items():
        path = tmp_path / name
        path.write_bytes(KINDS[f"rows.{name[2:]}"](rows) + (b"a,b\n" if name == "a.csv" else b""))
        with pytest.raises(BadInput) as caught:
            texts(path)
        assert str(caught.value.where).endswith(where)
    wrong = bytearray(data_files.tfrecord(rows[:9]))
    wrong[-6] ^= 1
    (tmp_path / "a.tfrecord").write_bytes(wrong)
    with pytest.raises(Damaged, match="checksum") as damaged:
        texts(tmp_path / "a.tfrecord")
    assert str(damaged.value.where).endswith("record 8")


def test_records_with_messages_come_from_tables(tmp_path):
    """Nested columns, as tables hold them: fields that a message does not have are null there."""
    rows = [
        {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4", "weight": 1}], "source": "x"},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}], "source": "y"},
    ]
    (tmp_path / "a.jsonl").write_bytes(data_files.jsonl(rows))
    expected = [document.record.text for document in source_of(tmp_path / "a.jsonl").documents()]
    cells = [{"messages": json.dumps(row["messages"]), "source": row["source"]} for row in rows]
    files = {"a.parquet": data_files.parquet(rows), "a.arrow": data_files.arrow(rows), "a.csv": data_files.csv_file(cells)}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        source = source_of(tmp_path / name)
        assert source.format == "messages"
        assert [document.record.text for document in source.documents()] == expected
        assert source.ignored == ("source",)


def test_the_columns_of_a_table_are_shown_and_renamed(tmp_path):
    (tmp_path / "a.parquet").write_bytes(data_files.parquet([{"question": "2 + 2?", "answer": "4"}] * 3))
    with pytest.raises(BadInput, match="a record of no known format") as caught:
        texts(tmp_path / "a.parquet")
    assert "it has `question`, `answer`" in str(caught.value.hint)
    assert "data.columns.prompt=question data.columns.completion=answer" in str(caught.value.hint)
    source = source_of(tmp_path / "a.parquet", columns={"prompt": "question", "completion": "answer"})
    assert [(document.record.prompt, document.record.completion) for document in source.documents()] == [("2 + 2?", "4")] * 3


def test_labels_of_a_table_of_separated_values_are_numbers_and_texts_are_not(tmp_path):
    (tmp_path / "a.csv").write_text('prompt,completion,label\n"1","2",True\n"[3]","4",False\n')
    records = [document.record for document in source_of(tmp_path / "a.csv").documents()]
    contents = [(record.prompt, record.completion, record.values) for record in records]
    assert contents == [("1", "2", {"desirable": 1.0}), ("[3]", "4", {"desirable": 0.0})]


def test_a_folder_of_every_kind(tmp_path):
    for name in KINDS:
        if name not in ("rows", "rows.json"):
            (tmp_path / name).write_bytes(KINDS[name](rows_of(5)))
    (tmp_path / "dataset_info.json").write_text("{}")
    assert texts(tmp_path) == [row["text"] for row in rows_of(5)] * (len(KINDS) - 2)
    assert texts(f"{tmp_path}/*.parquet") == [row["text"] for row in rows_of(5)] * 2


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "utf-16-le", "cp1251", "shift_jis", "utf-8-sig"])
def test_text_in_another_encoding(tmp_path, monkeypatch, encoding):
    monkeypatch.setattr(opening, "PIECE_BYTES", 16)
    text = {"cp1251": "Ещё один текст, и ещё. ", "shift_jis": "日本語の文章です。"}.get(encoding, "café au lait, déjà vu. ") * 3000
    record, table = json.dumps({"text": text}, ensure_ascii=False), f"text,id\n{text.replace(',', '')},1\n"
    for name, body in {"a.txt": text, "a.jsonl": record, "a.csv": table}.items():
        (tmp_path / name).write_bytes(body.encode(encoding))
        contents = "".join(texts(tmp_path / name, encoding=encoding))
        assert contents == (text.replace(",", "") if name == "a.csv" else text)


def test_bytes_that_are_not_of_the_encoding_are_placed(tmp_path):
    (tmp_path / "a.txt").write_bytes("abc".encode("utf-16-le") * 20_000 + b"\x00\xd8a\0")
    with pytest.raises(BadInput, match="not utf-16-le: illegal UTF-16 surrogate at offset 120,000"):
        texts(tmp_path / "a.txt", encoding="utf-16-le")
    with pytest.raises(BadInput, match="no text encoding `utf-61`"):
        texts(tmp_path / "a.txt", encoding="utf-61")
    (tmp_path / "b.txt").write_bytes("abc".encode("utf-16"))
    with pytest.raises(BadInput, match="UTF-16") as caught:
        texts(tmp_path / "b.txt")
    assert "data.encoding=utf-16" in str(caught.value.hint)


class Server:
    """A local HTTP server of a folder, which answers requests for ranges as object stores do."""

    def __init__(self, folder: Path):
        class Ranges(SimpleHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_GET(self):
                byte_range, path = self.headers.get("Range"), Path(self.translate_path(self.path))
                if byte_range is None or not path.is_file():
                    return super().do_GET()
                first, _, last = byte_range.removeprefix("bytes=").partition("-")
                data = path.read_bytes()
                part = data[int(first) : int(last) + 1 if last else None]
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}")
                self.send_header("Content-Length", str(len(part)))
                self.end_headers()
                self.wfile.write(part)

            def end_headers(self):
                self.send_header("Accept-Ranges", "bytes")
                super().end_headers()

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Ranges, directory=str(folder)))
        self.address = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> str:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self.address

    def __exit__(self, *_) -> None:
        self.server.shutdown()
        self.server.server_close()


ADDRESSED = ("rows.jsonl", "rows.jsonl.gz", "rows.parquet", "rows.arrow", "rows.tfrecord", "rows.tar", "rows.csv")


def test_addresses(tmp_path):
    """`file://` names a path of this machine, `memory://` stands for an object store, and files come over HTTP."""
    expected, files = [row["text"] for row in rows_of(50)], fsspec.filesystem("memory")
    for name in ADDRESSED:
        data = KINDS[name](rows_of(50))
        (tmp_path / name).write_bytes(data)
        files.pipe_file(f"/kinds/{name}", data)
        assert texts(f"file://{tmp_path / name}") == expected
        assert texts(f"memory://kinds/{name}") == expected
        assert source_of(f"memory://kinds/{name}").fingerprint() == source_of(tmp_path / name).fingerprint()
    assert texts("memory://kinds") == texts("memory://kinds/*") == expected * len(ADDRESSED)
    assert source_of("memory://kinds").fingerprint() == source_of(tmp_path).fingerprint()
    assert texts("jsonl:memory://kinds/rows.jsonl") == expected
    with pytest.raises(BadInput, match="no such file"):
        texts("memory://kinds/rows.jsonnl")
    with pytest.raises(BadInput, match="no files to read"):
        texts("memory://kinds/*.nothing")
    files.rm("/kinds", recursive=True)


def test_files_over_http(tmp_path):
    expected = [row["text"] for row in rows_of(50)]
    with Server(tmp_path) as address:
        for name in ADDRESSED:
            (tmp_path / name).write_bytes(KINDS[name](rows_of(50)))
            assert texts(f"{address}/{name}") == expected, name
        with pytest.raises(BadInput, match="no such file"):
            texts(f"{address}/gone.jsonl")
    with pytest.raises(BadInput) as caught:
        texts(f"{address}/rows.jsonl")
    assert address in str(caught.value)


def test_without_pyarrow_the_error_has_the_line_that_installs_it(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(data_files.parquet(rows_of(3)))
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(BadInput, match="pyarrow, which is not installed") as caught:
        texts(tmp_path / "a.parquet")
    assert caught.value.hint == install_extra("data")


def test_a_path_that_bagz_reads_as_several_files_is_refused(tmp_path, monkeypatch):
    data = KINDS["rows.bagz"](rows_of(3))
    for name in ("a,b.bagz", "a@2.bagz"):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(BadInput, match="as several files") as caught:
            texts(tmp_path / name)
        assert str(caught.value.where) == str(tmp_path / name)
    (tmp_path / "a.bagz").write_bytes(data)
    monkeypatch.setitem(__import__("sys").modules, "bagz", None)
    with pytest.raises(BadInput, match="bagz, which is not installed") as missing:
        texts(tmp_path / "a.bagz")
    assert missing.value.hint == install_extra("bagz")


def test_the_checksum_is_that_of_the_standard():
    """RFC 3720, appendix B.4, and a loop over bits."""
    assert crc32c([b"123456789", bytes(32), b"\xff" * 32]) == [0xE3069283, 0x8A9136AA, 0x62A8AB43]
    draw = random.Random(1)
    strings = [draw.randbytes(size) for size in (0, 1, 3, 4, 5, 17, 127, 128, 129, 300)]
    assert crc32c(strings) == [data_files.crc32c(data) for data in strings]


def test_features_of_examples(tmp_path):
    """Numbers of every sign, lists, and several types."""
    row = {"prompt": "a", "whole": -3, "list": [1, 300, -1], "number": 0.5, "names": ["x", "é"]}
    (tmp_path / "a.tfrecord").write_bytes(data_files.record_frame(data_files.example(row)))
    (document,) = source_of(tmp_path / "a.tfrecord", format="prompt").documents()
    assert document.record is not None
    assert document.record.columns == {name: value for name, value in row.items() if name != "prompt"}
