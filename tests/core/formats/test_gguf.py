"""GGUF against the gguf library and the model's safetensors; hostile files."""

import json
import struct
import sys
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from helpers import shared

from argosy.core.errors import ArgosyError, BadInput, Damaged, Unsupported
from argosy.core.formats.gguf import GGUF
from argosy.core.formats.safetensors import SafeTensors

VALUES = {
    "a.u8": (200, gguf.GGUFValueType.UINT8),
    "a.i8": (-3, gguf.GGUFValueType.INT8),
    "a.u16": (60_000, gguf.GGUFValueType.UINT16),
    "a.i16": (-300, gguf.GGUFValueType.INT16),
    "a.u32": (2**32 - 1, gguf.GGUFValueType.UINT32),
    "a.i32": (-(2**31), gguf.GGUFValueType.INT32),
    "a.f32": (0.5, gguf.GGUFValueType.FLOAT32),
    "a.u64": (2**64 - 1, gguf.GGUFValueType.UINT64),
    "a.i64": (-(2**63), gguf.GGUFValueType.INT64),
    "a.f64": (0.1, gguf.GGUFValueType.FLOAT64),
    "a.bool": (True, gguf.GGUFValueType.BOOL),
    "a.text": ("zwölf Boxkämpfer", gguf.GGUFValueType.STRING),
}


def write_examples(path, alignment: int = 32) -> dict[str, np.ndarray]:
    """A file with a value of each type and a few tensors, by the library."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    for key, (value, kind) in VALUES.items():
        writer.add_key_value(key, value, kind)
    writer.add_array("b.ints", [1, 2, 3])
    writer.add_array("b.texts", ["a", "", "ä"])
    writer.add_array("b.bools", [True, False])
    tensors = {
        "matrix": rng.normal(size=(3, 5)).astype(np.float32),
        "half": rng.normal(size=7).astype(np.float16),
        "ints": np.arange(6, dtype=np.int8).reshape(1, 2, 3),
        "double": np.array([0.25]),
    }
    for name, x in tensors.items():
        writer.add_tensor(name, x)
    blocks = rng.normal(size=(2, 64)).astype(np.float32)
    tensors["blocks"] = gguf.quantize(blocks, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blocks", tensors["blocks"], raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors["blocks"] = gguf.dequantize(tensors["blocks"], gguf.GGMLQuantizationType.Q8_0)
    return tensors


@pytest.mark.parametrize("alignment", [32, 8, 256])
def test_reads_what_the_library_writes(tmp_path, alignment):
    tensors = write_examples(tmp_path / "x.gguf", alignment)
    file = GGUF.open(tmp_path / "x.gguf")
    assert file.version == 3
    assert {key: file.meta[key] for key in VALUES} == {key: value for key, (value, _) in VALUES.items()}
    assert file.meta["b.ints"].tolist() == [1, 2, 3]
    assert file.meta["b.texts"] == ["a", "", "ä"]
    assert file.meta["b.bools"].tolist() == [True, False]
    assert list(file.names) == list(tensors)
    for name, x in tensors.items():
        got = file.read(name)
        assert got.dtype == x.dtype == file.dtype(name)
        assert got.shape == x.shape == file.shape(name)
        assert got.tobytes() == x.tobytes()
    assert file.type("blocks") == "Q8_0"
    assert file.raw("blocks").shape == (2, 68)


@pytest.mark.parametrize("name", ["gguf/stories260K-q8_0.gguf", "tokenizers/gguf/ggml-vocab-bert-bge.gguf"])
def test_metadata_equals_the_library(name):
    ours, theirs = GGUF.open(shared(name)), gguf.GGUFReader(shared(name))
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert list(ours.meta) == list(fields)
    for key, value in fields.items():
        got = ours.meta[key]
        assert (got.tolist() if isinstance(got, np.ndarray) else got) == value, key
    assert len(ours.meta["tokenizer.ggml.tokens"]) > 500


def hub_name(name: str) -> str:
    """llama.cpp's names of a Llama's tensors, in the Hub's."""
    pairs = {
        "token_embd": "model.embed_tokens", "output_norm": "model.norm", "blk.": "model.layers.",
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj",
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    for ggml, hub in pairs.items():
        name = name.replace(ggml, hub)
    return name


def pairs_to_halves(x: np.ndarray) -> np.ndarray:
    """llama.cpp keeps rotary pairs side by side; head size 8."""
    return x.reshape(-1, 4, 2, x.shape[1]).swapaxes(1, 2).reshape(x.shape)


def test_f32_equals_safetensors():
    file = GGUF.open(shared("gguf/stories260K-f32.gguf"))
    hub = SafeTensors.open(shared("models/stories260k/model.safetensors"))
    assert {hub_name(name) for name in file.names} == set(hub.names)
    for name in file.names:
        x = file.read(name)
        x = pairs_to_halves(x) if "attn_q." in name or "attn_k." in name else x
        assert x.tobytes() == hub.read(hub_name(name)).tobytes(), name


def test_q8_0_equals_the_library_and_stays_near_the_weights():
    path = shared("gguf/stories260K-q8_0.gguf")
    file, exact = GGUF.open(path), GGUF.open(shared("gguf/stories260K-f32.gguf"))
    kinds = set()
    for tensor in gguf.GGUFReader(path).tensors:
        got = file.read(tensor.name)
        if got.ndim > 1:
            assert file.read_part(tensor.name, 3).tobytes() == got[3].tobytes()
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert got.tobytes() == np.ascontiguousarray(expected).tobytes()
        assert file.type(tensor.name) == tensor.tensor_type.name
        weights = exact.read(tensor.name)
        step = np.abs(weights).max() / 127
        assert np.abs(got - weights).max() <= step * (0.5 + 127 / 2048)  # half a step, and a scale rounded to float16
        kinds.add(file.type(tensor.name))
    assert kinds == {"F32", "Q8_0"}


def test_the_golden_of_smollm2_fits_the_table():
    """Types and shapes of a real file of 272 tensors, from its golden description."""
    from argosy.core.formats.quants import BY_NAME

    golden = json.loads(shared("models/smollm2/gguf_tensors.json").read_text())["tensors"]
    assert all(t["shape"][-1] % BY_NAME[t["type"]].values == 0 for t in golden)
    assert {t["type"] for t in golden} >= {"F32", "Q4_1", "Q8_0"}


# ---- hostile files


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: bytes, shape: list[int], kind: int = 0, offset: int = 0, axes: int | None = None) -> bytes:
    axes = len(shape) if axes is None else axes
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", axes, *shape, kind, offset)


def gguf_of(pairs: list[bytes] = (), tensors: list[bytes] = (), data: int = 0, **say: object) -> bytes:
    """A file whose counts say the truth unless told; `data` bytes after padding to 32."""
    counts = (say.get("version", 3), say.get("n_tensors", len(tensors)), say.get("n_pairs", len(pairs)))
    head = say.get("magic", b"GGUF") + struct.pack("<IQQ", *counts) + b"".join(pairs) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32 + data)


def array(kind: int, count: int, body: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + body


GOOD = gguf_of([pair(b"a", 4, b"\1\0\0\0")], [tensor(b"x", [4])], 16)

HOSTILE = {
    "nothing": b"",
    "magic": gguf_of(magic=b"GGML"),
    "short": GOOD[:20],
    "count of tensors": gguf_of(n_tensors=2**60),
    "count of keys": gguf_of(n_pairs=2**60),
    "count of keys near": gguf_of([pair(b"a", 0, b"\0")], n_pairs=9),
    "key length": gguf_of([struct.pack("<Q", 2**63) + b"x" * 60], n_pairs=1),
    "key over the limit": gguf_of([pair(b"k" * 70_000, 0, b"\0")]),
    "key not UTF-8": gguf_of([pair(b"\xff", 0, b"\0")]),
    "key twice": gguf_of([pair(b"a", 0, b"\0")] * 2),
    "text length": gguf_of([pair(b"a", 8, struct.pack("<Q", 2**64 - 1))]),
    "text not UTF-8": gguf_of([pair(b"a", 8, text(b"\xc3("))]),
    "type of value": gguf_of([pair(b"a", 13, b"\0" * 20)]),
    "type of array": gguf_of([pair(b"a", 9, array(99, 1, b"\0" * 20))]),
    "bool": gguf_of([pair(b"a", 7, b"\2")]),
    "bools": gguf_of([pair(b"a", 9, array(7, 2, b"\1\2"))]),
    "array count": gguf_of([pair(b"a", 9, array(0, 2**62))]),
    "array count overflow": gguf_of([pair(b"a", 9, array(10, 2**61 + 1))]),
    "array of texts": gguf_of([pair(b"a", 9, array(8, 2**40))]),
    "arrays nested": gguf_of([pair(b"a", 9, array(9, 1) * 5 + array(0, 0))]),
    "arrays in arrays": gguf_of([pair(b"a", 9, array(9, 2**40, array(0, 0) * 8))]),
    "alignment 0": gguf_of([pair(b"general.alignment", 4, b"\0" * 4)]),
    "alignment 24": gguf_of([pair(b"general.alignment", 4, struct.pack("<I", 24))]),
    "alignment a text": gguf_of([pair(b"general.alignment", 8, text(b"32"))]),
    "alignment true": gguf_of([pair(b"general.alignment", 7, b"\1")]),
    "name twice": gguf_of([], [tensor(b"x", [4]), tensor(b"x", [4], offset=32)], 64),
    "five axes": gguf_of([], [tensor(b"x", [1] * 5)], 16),
    "axes of 2^32": gguf_of([], [tensor(b"x", [4], axes=2**32 - 1)], 16),
    "dims overflow": gguf_of([], [tensor(b"x", [2**32, 2**32])], 16),
    "dims overflow to 4": gguf_of([], [tensor(b"x", [2**62 + 1, 4])], 16),
    "dims overflow with 0": gguf_of([], [tensor(b"x", [2**40, 2**40, 0])], 16),
    "half a block": gguf_of([], [tensor(b"x", [33], kind=8)], 34),
    "scalar of a block type": gguf_of([], [tensor(b"x", [], kind=8)], 34),
    "offset unaligned": gguf_of([], [tensor(b"x", [4], offset=8)], 64),
    "offset outside": gguf_of([], [tensor(b"x", [4], offset=64)], 64),
    "offset of 2^63": gguf_of([], [tensor(b"x", [4], offset=2**63)], 64),
    "data cut short": GOOD[:-1],
    "overlap": gguf_of([], [tensor(b"x", [16]), tensor(b"y", [4], offset=32)], 64),
    "the same bytes": gguf_of([], [tensor(b"x", [4]), tensor(b"y", [4])], 64),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_damaged(name, tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(HOSTILE[name])
    tracemalloc.start()
    with pytest.raises(Damaged) as error:
        GGUF.open(path)
    assert tracemalloc.get_traced_memory()[1] < 20 * len(HOSTILE[name]) + 100_000
    tracemalloc.stop()
    assert len(str(error.value).splitlines()) <= 5


@pytest.mark.parametrize("name", [name for name in HOSTILE if "count" in name or name.endswith("length")])
def test_counts_are_held_against_the_bytes_left(name, tmp_path):
    """Before the first of what they count is read."""
    (tmp_path / "x").write_bytes(HOSTILE[name])
    with pytest.raises(Damaged, match="do not fit into"):
        GGUF.open(tmp_path / "x")


def test_the_unchanged_file_is_accepted(tmp_path):
    (tmp_path / "x").write_bytes(GOOD)
    file = GGUF.open(tmp_path / "x")
    assert (file.meta, file.read("x").tolist()) == ({"a": 1}, [0] * 4)


def test_version_2_and_nested_arrays(tmp_path):
    inner = array(4, 2, struct.pack("<2I", 7, 8)) + array(8, 1, text(b"x"))
    (tmp_path / "x").write_bytes(gguf_of([pair(b"a", 9, array(9, 2, inner))], version=2))
    first, second = GGUF.open(tmp_path / "x").meta["a"]
    assert (first.tolist(), second) == ([7, 8], ["x"])


def test_a_dimension_of_zero_and_a_scalar(tmp_path):
    (tmp_path / "x").write_bytes(gguf_of([], [tensor(b"none", [0, 3]), tensor(b"one", [])], 4))
    file = GGUF.open(tmp_path / "x")
    assert (file.read("none").shape, file.read("one").shape) == ((3, 0), ())


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (gguf_of(version=1), "version 1"),
        (gguf_of(version=4), "version 4"),
        (gguf_of(version=3 << 24), "big endian"),
        (gguf_of([], [tensor(b"x", [32], kind=4)], 64), "type 4"),
        (gguf_of([pair(b"split.count", 2, b"\2\0")]), "split"),
    ],
)
def test_what_cannot_be_read_is_reported(data, match, tmp_path):
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(Unsupported, match=match):
        GGUF.open(tmp_path / "x")


def test_a_type_without_a_decoder_opens_and_is_refused_when_read(tmp_path):
    (tmp_path / "x").write_bytes(gguf_of([], [tensor(b"x", [256], kind=16)], 66))
    file = GGUF.open(tmp_path / "x")
    assert (file.type("x"), file.raw("x").shape) == ("IQ2_XXS", (66,))
    with pytest.raises(Unsupported, match="IQ2_XXS"):
        file.read("x")
    with pytest.raises(BadInput, match="no file"):
        GGUF.open(tmp_path / "none")


@pytest.mark.slow
def test_mutations_never_crash(tmp_path):
    """2,000 files with 1 to 4 wrong bytes, most of them before the data, or cut short."""
    rng = np.random.default_rng(0)
    write_examples(tmp_path / "good")
    good = (tmp_path / "good").read_bytes()
    header = min(place.begin for place in GGUF.open(tmp_path / "good").places.values())
    path, outcomes = tmp_path / "x", {"read": 0, "refused": 0}
    tracemalloc.start()
    for i in range(2000):
        bad = bytearray(good)
        for _ in range(rng.integers(1, 5)):
            bad[rng.integers(0, header if i % 10 else len(bad))] = rng.integers(0, 256)
        path.write_bytes(bad[: rng.integers(0, len(bad))] if i % 20 == 0 else bad)
        try:
            file = GGUF.open(path)
            for name in file.names:
                assert file.read(name).shape == file.shape(name)
            outcomes["read"] += 1
        except ArgosyError:
            outcomes["refused"] += 1
    assert tracemalloc.get_traced_memory()[1] < 20 * len(good) + 2_000_000
    tracemalloc.stop()
    assert outcomes["refused"] > 500
    assert outcomes["read"] > 100


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not tell which bytes of a file are resident")
def test_bytes_that_were_dequantized_leave_memory(tmp_path: Path):
    """A view of one tensor keeps the whole file mapped: 98 MB of a server's memory, for a few norms in float32."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("norm", np.ones(32, np.float32))
    blocks = np.zeros((4096, 18 * 32), np.uint8)
    writer.add_tensor("matrix", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUF.open(path)
    norm = file.read("norm")
    assert file.read("matrix").shape == (4096, 1024)
    assert resident(path) < 0.1 * blocks.nbytes
    assert not file.read("matrix").any()
    assert norm.all()


def resident(path: Path) -> int:
    """Bytes of a mapped file in this process's memory."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.endswith(str(path)))
    return 1024 * int(next(line for line in lines[at:] if line.startswith("Rss:")).split()[1])
