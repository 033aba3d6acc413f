"""Sources: what they yield, how they cope with damaged and wrong input, what their fingerprints tell apart."""

import ast
import gzip
import random
import re
import sys
import sysconfig
from pathlib import Path

import pytest
from helpers import shared

from argosy.core.errors import BadInput, Damaged
from argosy.core.input_files import InputFile
from argosy.data.settings import DataSettings
from argosy.data.sources import Capped, Document, RowSource, Source, jsonl, opening, text
from argosy.data.sources.find import find_source
from argosy.data.sources.folder import FileSet
from argosy.data.sources.jsonl import JsonLines
from argosy.data.sources.stdlib import Docstrings, StandardLibrary, docstrings
from argosy.data.sources.text import TextFile, TextsInMemory


def texts(source: Source | RowSource) -> list[str]:
    """Whole documents: pieces joined."""
    assert isinstance(source, Source)
    documents, open_document = [], False
    for document in source.documents():
        documents = [*documents[:-1], documents[-1] + document.text] if open_document else [*documents, document.text]
        open_document = not document.ends
    assert not open_document
    return documents


def write(path: Path, data: str | bytes) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


@pytest.mark.parametrize("piece_bytes", [5, 16, 100, 1 << 20])
def test_a_file_in_pieces_is_the_file(tmp_path, monkeypatch, piece_bytes):
    monkeypatch.setattr(text, "PIECE_BYTES", piece_bytes)
    draw = random.Random(piece_bytes)
    for length in (1, 4, 5, 6, 33, 400):
        whole = "".join(draw.choice("ab \n\n\té漢🙂") for _ in range(length)) + "end"
        assert texts(TextFile(write(tmp_path / "t.txt", whole))) == [whole]


def test_pieces_end_where_pretokenizers_split(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "PIECE_BYTES", 64)
    whole = "".join(f"line {i}\n" + "\n    " * (i % 3) for i in range(100)) + "x"
    pieces = [document.text for document in TextFile(write(tmp_path / "t.txt", whole)).documents()]
    assert len(pieces) > 10
    assert all(piece.endswith("\n") for piece in pieces[:-1])
    assert not any(piece[0].isspace() for piece in pieces)


def test_paragraphs_are_those_of_the_whole_text(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "PIECE_BYTES", 1000)
    path = shared("text/tinystories_sample.txt")
    whole = path.read_text(encoding="utf-8")
    expected = [part.strip("\r\n") for part in re.split(r"\n\s*\n", whole) if part.strip()]
    assert texts(TextFile(path, documents="paragraphs")) == expected
    assert len(expected) > 200


def test_gzip_and_byte_order_mark(tmp_path):
    plain = write(tmp_path / "t.txt", b"\xef\xbb\xbfh\xc3\xa9")
    packed = write(tmp_path / "t.txt.gz", gzip.compress(plain.read_bytes()))
    assert texts(TextFile(plain)) == texts(TextFile(packed)) == ["hé"]


def test_shakespeare_unpacked_is_what_gzip_says(tmp_path):
    path = shared("text/shakespeare_complete.txt.gz")
    assert texts(TextFile(path)) == [gzip.decompress(path.read_bytes()).decode()]


@pytest.mark.parametrize("cut", [10, 500, -9, -4])
def test_a_truncated_gzip_is_damaged(tmp_path, cut):
    packed = gzip.compress(random.Random(0).randbytes(2000).hex().encode())
    with pytest.raises(Damaged, match="gzip"):
        list(TextFile(write(tmp_path / "t.txt.gz", packed[:cut])).documents())


@pytest.mark.parametrize("offset", [0, 7, 63, 64, 65, 999])
def test_invalid_utf8_is_reported_with_its_offset(tmp_path, monkeypatch, offset):
    monkeypatch.setattr(text, "PIECE_BYTES", 64)
    data = bytearray(("x" * 30 + "\n").encode() * 40)
    data[offset] = 0xFF
    path = write(tmp_path / "t.txt", bytes(data))
    with pytest.raises(BadInput, match=rf"0xff at offset {offset}\n"):
        list(TextFile(path).documents())
    replaced = texts(TextFile(path, invalid="replace"))[0]
    assert replaced.index("\ufffd") == offset


def test_json_lines(tmp_path):
    path = write(tmp_path / "t.jsonl", '{"text": "one"}\n\n{"text": "tw\\u00f6", "id": 3}\n')
    assert texts(JsonLines(path)) == ["one", "twö"]


@pytest.mark.parametrize(
    "line, problem",
    [
        ('{"text": 3}', "no text in the field"),
        ('{"messages": []}', "no text in the field"),
        ("{", "not a line of JSON"),
        ("[1]", "must be an object"),
        ("[" * 100_000, "not a line of JSON"),
        ('{"text": "\udcff"}', "not UTF-8"),
    ],
)
def test_a_wrong_line_of_json_is_reported_with_its_number(tmp_path, line, problem):
    path = write(tmp_path / "t.jsonl", b'{"text": "good"}\n' + line.encode(errors="surrogateescape") + b"\n")
    with pytest.raises(BadInput, match=problem) as e:
        list(JsonLines(path).documents())
    assert "t.jsonl:2" in str(e.value) or "offset 27" in str(e.value)
    assert len(str(e.value).splitlines()) <= 5


def test_an_endless_line_of_json_is_not_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "LINE_BYTES", 100)
    with pytest.raises(BadInput, match="longer than"):
        list(JsonLines(write(tmp_path / "t.jsonl", '{"text": "' + "x" * 200 + '"}')).documents())


BINARIES = {
    "SQLite": b"SQLite format 3\0" * 9,
    "PDF": b"%PDF-1.7\n%\xe2\xe3\xcf\xd3" * 9,
    "numpy": b"\x93NUMPY\x01\0" * 9,
    "UTF-16": "hi".encode("utf-16"),
}


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.parquet", "a.txt.gz"])
@pytest.mark.parametrize("kind", BINARIES)
def test_a_file_that_is_no_text_is_refused_by_what_it_is_whatever_its_name(tmp_path, kind, name):
    """Its bytes are never trained on, also where bytes that are not UTF-8 are to be replaced, and no hint says to do that."""
    data = gzip.compress(BINARIES[kind]) if name.endswith(".gz") else BINARIES[kind]
    path = write(tmp_path / name, data)
    for spec, fields in ((str(path), {}), (f"text:{path}", {}), (f"{tmp_path}/a*", {}), (str(path), {"invalid": "replace"})):
        with pytest.raises(BadInput, match=f"this is .*{kind}.*, not text") as caught:
            texts(find_source(DataSettings(source=spec, **fields)))
        assert "invalid" not in str(caught.value)
        assert caught.value.where == str(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "a.jsonl.gz", "a.txt"])
def test_a_byte_order_mark_is_no_part_of_any_file(tmp_path, name):
    body = {"a.json": '[{"text": "one"}, {"text": "two"}]', "a.txt": "one"}.get(name, '{"text": "one"}\n{"text": "two"}\n')
    data = f"\ufeff{body}".encode()
    path = write(tmp_path / name, gzip.compress(data) if name.endswith(".gz") else data)
    assert texts(find_source(DataSettings(source=str(path)))) == (["one"] if name == "a.txt" else ["one", "two"])


@pytest.mark.parametrize("array", [False, True])
def test_half_of_a_surrogate_pair_is_reported_with_its_record(tmp_path, array):
    rows = ['{"text": "good"}', '{"text": "bad \\ud800 half"}']
    path = write(tmp_path / ("a.json" if array else "a.jsonl"), f"[{','.join(rows)}]" if array else "\n".join(rows))
    where = f"{path}, record 1" if array else f"{path}:2"
    with pytest.raises(BadInput, match="half of a surrogate pair") as caught:
        texts(find_source(DataSettings(source=str(path))))
    assert caught.value.where == where


def test_a_folder_reads_its_files_in_the_order_of_their_paths(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    write(tmp_path / "z.txt", "z")
    write(tmp_path / "b" / "a.jsonl", '{"text": "json"}')
    write(tmp_path / "b" / "b.md", "md")
    write(tmp_path / "a.txt.gz", gzip.compress(b"gz"))
    write(tmp_path / "image.png", b"\xff\x00")
    write(tmp_path / ".hidden" / "a.txt", "hidden")
    assert texts(FileSet(tmp_path)) == ["gz", "json", "md", "z"]
    assert texts(find_source(DataSettings(source=str(tmp_path / "**" / "*.md")))) == ["md"]
    assert texts(find_source(DataSettings(source=str(tmp_path / "b")))) == ["json", "md"]


def test_fingerprints_follow_content_and_not_place(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        write(folder / "a.txt", "same")
    assert TextFile(here / "a.txt").fingerprint() == TextFile(there / "a.txt").fingerprint()
    assert FileSet(here).fingerprint() == FileSet(there).fingerprint()
    before = FileSet(there).fingerprint()
    (there / "a.txt").rename(there / "b.txt")
    assert FileSet(there).fingerprint() != before
    write(there / "b.txt", "Same")
    assert TextFile(here / "a.txt").fingerprint() != TextFile(there / "b.txt").fingerprint()


def test_a_large_file_is_known_by_its_size_and_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "HASHED_BYTES", 1000)
    monkeypatch.setattr(opening, "PIECE_BYTES", 10)
    data = bytearray(random.Random(0).randbytes(5000))
    hashes = [opening.content_hash(InputFile(write(tmp_path / "t", bytes(data))))]
    for change in (0, 4999):
        data[change] ^= 1
        hashes.append(opening.content_hash(InputFile(write(tmp_path / "t", bytes(data)))))
    hashes.append(opening.content_hash(InputFile(write(tmp_path / "t", bytes(data[:-1])))))
    assert len(set(hashes)) == 4


@pytest.mark.parametrize("limit", [1, 5, 6, 7, 8, 100])
def test_a_cap_keeps_whole_characters(limit):
    capped = Capped(TextsInMemory(["abc", "é漢", "def"]), limit)
    joined = "".join(texts(capped))
    whole = "abcé漢def"
    assert whole.startswith(joined)
    assert len(joined.encode()) <= limit < len(joined.encode()) + 3 or joined == whole


def test_the_nearest_file_is_named(tmp_path):
    write(tmp_path / "shakespeare.txt", "x")
    with pytest.raises(BadInput, match="no such data source") as e:
        find_source(DataSettings(source=str(tmp_path / "shakespear.txt")))
    assert "did you mean" in str(e.value)
    assert "shakespeare.txt" in str(e.value)
    with pytest.raises(BadInput) as e:
        find_source(DataSettings(source="stdlob"))
    assert "did you mean `stdlib`" in str(e.value)
    with pytest.raises(BadInput, match="no such data source") as e:
        find_source(DataSettings(source=str(tmp_path / "zzz.jsonl")))
    assert "no such file" in str(e.value)
    assert "shakespeare" not in str(e.value)
    with pytest.raises(BadInput) as e:
        find_source(DataSettings(source=str(tmp_path / "nowhere" / "t.txt")))
    assert "there is no folder" in str(e.value)


def test_a_reader_may_be_chosen_by_name(tmp_path):
    path = write(tmp_path / "server.log", "log")
    assert texts(find_source(DataSettings(source=f"text:{path}"))) == ["log"]
    assert texts(find_source(DataSettings(source=str(path)))) == ["log"]
    assert texts(find_source(DataSettings(source="memory:some words"))) == ["some words"]
    with pytest.raises(BadInput, match="takes no argument"):
        find_source(DataSettings(source="stdlib:json"))
    with pytest.raises(BadInput, match="no files to read"):
        find_source(DataSettings(source=str(tmp_path)))


def test_the_standard_library_is_read_and_not_imported():
    before = set(sys.modules)
    source = StandardLibrary()
    names = [path.relative_to(source.root).as_posix() for path in source.paths]
    assert names == sorted(names, key=lambda name: Path(name).parts)
    assert {"argparse.py", "json/__init__.py", "email/message.py"} <= set(names)
    assert not [name for name in names if re.search(r"(^|/)(tests?|idlelib|encodings|site-packages|lib2to3)/", name)]
    library = texts(source)
    assert Path(sysconfig.get_path("stdlib"), "abc.py").read_text(encoding="utf-8") in library
    assert sum(map(len, library)) > 5_000_000
    assert set(sys.modules) == before
    assert source.fingerprint()["source.python"].endswith(".".join(map(str, sys.version_info[:3])))


def test_a_python_without_sources_is_reported(tmp_path):
    with pytest.raises(BadInput, match="no source files"):
        StandardLibrary(tmp_path)


def test_docstrings_are_those_of_ast(tmp_path):
    source = 'r"""Module \\d."""\nclass A:\n    """Class."""\n    async def f(self):\n        """\n        Deep.\n        """\n'
    assert list(docstrings(source)) == ["Module \\d.", "Class.", "Deep."]
    assert list(docstrings("def broken(:")) == []
    write(tmp_path / "a.py", source)
    (tmp_path / "test").mkdir()
    write(tmp_path / "test" / "b.py", '"""Left out."""')
    assert texts(Docstrings(tmp_path)) == ["Module \\d.", "Class.", "Deep."]
    assert ast.get_docstring(ast.parse(source)) == "Module \\d."


def test_spans_need_tokens():
    with pytest.raises(ValueError, match="tokens"):
        Document("text", learn=((0, 1),))
