"""Files that hold no text, as other programs write them, are recognized by what they hold; text never is."""

import bz2
import gzip
import io
import lzma
import pickle
import sqlite3
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from helpers import shared

from argosy.core.errors import BadInput
from argosy.core.formats.recognize import HEAD_BYTES, binary_kind, refuse_binary


def numpy_array() -> bytes:
    file = io.BytesIO()
    np.save(file, np.arange(3))
    return file.getvalue()


def numpy_archive() -> bytes:
    file = io.BytesIO()
    np.savez(file, a=np.arange(3))
    return file.getvalue()


def archive(name: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as out:
        out.writestr(name, "text")
    return file.getvalue()


def tar() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as out:
        out.addfile(tarfile.TarInfo("a.txt"), io.BytesIO())
    return file.getvalue()


def database(folder: Path) -> bytes:
    with sqlite3.connect(folder / "made.db") as base:
        base.execute("create table t (x)")
    base.close()
    return (folder / "made.db").read_bytes()


def tensors(folder: Path) -> bytes:
    from safetensors.numpy import save_file

    save_file({"a": np.zeros(2, np.float32)}, folder / "made.safetensors")
    return (folder / "made.safetensors").read_bytes()


# What files of programs that are not installed begin with (arrow.apache.org/docs/format, parquet.apache.org/docs/file-format).
BEGINNINGS = {
    "a Parquet file": b"PAR1\x15\x04\x15\x10",
    "an Arrow file": b"ARROW1\0\0\xff\xff\xff\xff",
    "an Arrow stream": b"\xff\xff\xff\xff\x70\x00\x00\x00",
    "an Avro file": b"Obj\x01\x04\x14avro.codec",
    "a Zstandard archive": b"\x28\xb5\x2f\xfd\x04\x00",
    "a PDF document": b"%PDF-1.7\n%\xe2\xe3\xcf\xd3",
    "a JPEG image": b"\xff\xd8\xff\xe0\x00\x10JFIF\0",
    "a WAV recording": b"RIFF\x24\x00\x00\x00WAVEfmt \x10\x00",
    "UTF-16 text": "words".encode("utf-16"),
    "a binary file of a kind that is not known here": bytes(range(256)),
}


@pytest.mark.parametrize("kind", BEGINNINGS)
def test_beginnings_that_specifications_name(kind):
    assert (binary_kind(BEGINNINGS[kind]) or [""])[0] == kind


def test_what_other_programs_write(tmp_path):
    files = {
        "an array of numpy (.npy)": numpy_array(),
        "an archive of numpy arrays (.npz)": numpy_archive(),
        "a zip archive": archive("a.txt"),
        "an Office document": archive("[Content_Types].xml"),
        "a checkpoint of PyTorch": archive("archive/data.pkl"),
        "a tar archive": tar(),
        "a gzip archive": gzip.compress(b"text"),
        "a bzip2 archive": bz2.compress(b"text" * 9),
        "an xz archive": lzma.compress(b"text"),
        "a Python pickle": pickle.dumps({"a": 1}),
        "an SQLite database": database(tmp_path),
        "a safetensors file": tensors(tmp_path),
        "a GGUF model": shared("gguf/stories260K-q8_0.gguf").read_bytes(),
        "a PNG image": shared("images/china_256.png").read_bytes(),
    }
    assert {kind: (binary_kind(data[:HEAD_BYTES]) or [""])[0] for kind, data in files.items()} == {kind: kind for kind in files}


@pytest.mark.parametrize("text", [
    "", "a", "Obj is a word", "ORCs and GIF87 and PAR1", "PAR1 begins a line", "BZh begins another", "GIF89a", "OggSome words",
    "\ufeffmarked", "漢" * 400, "x" + "é" * 400, "a zero \0 byte", "\x1b[31mred", "12345678{", "words and more\x7f",
])  # fmt: skip
def test_text_is_never_refused(text):
    for size in (HEAD_BYTES, HEAD_BYTES - 1, HEAD_BYTES - 2):
        refuse_binary(text.encode()[:size], "here")


def test_latin_1_is_left_to_who_decodes_it():
    """A byte that is not UTF-8 has an offset, which only the reader of the whole file knows."""
    assert binary_kind("café au lait".encode("latin-1")) is None


def test_the_error_says_what_it_is_and_where():
    with pytest.raises(BadInput, match="this is a Parquet file, not text") as caught:
        refuse_binary(BEGINNINGS["a Parquet file"], "data.txt")
    assert caught.value.where == "data.txt"
    assert "JSON lines" in str(caught.value.hint)
