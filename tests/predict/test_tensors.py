"""Tensors of the Open Inference Protocol, against bytes written by hand."""

import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from argosy.core.errors import BadInput
from argosy.data.tokenizers.byte import ByteTokenizer
from argosy.export.manifest import BundleSignature
from argosy.export.steps import TokenizeStep, tokenize_inputs
from argosy.predict.protocol import check_types
from argosy.predict.tensors import DATATYPES, from_bytes, read_tensors, to_bytes, to_json
from argosy.web.errors import ApiError


def tensor(data: Any = None, shape: Any = (2, 2), datatype: str = "FP32", **parameters: Any) -> dict[str, Any]:
    document = {"name": "x", "shape": list(shape) if isinstance(shape, tuple) else shape, "datatype": datatype}
    return document | ({} if data is None else {"data": data}) | ({"parameters": parameters} if parameters else {})


@pytest.mark.parametrize("datatype", DATATYPES)
def test_numbers_go_through_json_and_bytes_unchanged(datatype: str):
    dtype = DATATYPES[datatype]
    value = np.asarray([[0, 1], [1, 0]] if datatype == "BOOL" else [[1, 2], [3, 100]]).astype(dtype)
    kind, shape, data = to_bytes(value)
    assert (kind, shape) == (datatype, [2, 2])
    body = [tensor(datatype=datatype, binary_data_size=len(data))]
    np.testing.assert_array_equal(read_tensors(body, memoryview(data))["x"], value)
    kind, shape, flat = to_json(value)
    for form in (flat, [flat[:2], flat[2:]]):
        array = read_tensors([tensor(form, datatype=datatype)], memoryview(b""))["x"]
        assert array.dtype == dtype
        np.testing.assert_array_equal(array, value)


def test_bytes_are_little_endian_and_texts_have_their_length():
    np.testing.assert_array_equal(from_bytes("x", (2,), "INT32", b"\x01\x00\x00\x00\x00\x01\x00\x00"), [1, 256])
    raw = struct.pack("<I", 2) + b"ab" + struct.pack("<I", 0) + struct.pack("<I", 2) + "é".encode()
    assert from_bytes("x", (3,), "BYTES", raw) == ["ab", "", "é"]
    assert to_bytes(["ab", "", "é"]) == ("BYTES", [3], raw)


def test_types_without_a_name_are_sent_as_floats():
    value = np.asarray([1.5, -2], ml_dtypes.float8_e4m3fn)
    assert to_json(value) == ("FP32", [2], [1.5, -2.0])


@pytest.mark.parametrize(
    ("inputs", "binary", "problem"),
    [
        ("x", b"", "no list of tensors"),
        ([{"name": "x", "shape": [1]}], b"", "no `datatype`"),
        ([tensor([1, 2], [-1])], b"", "no list of sizes"),
        ([tensor([1, 2], [True])], b"", "no list of sizes"),
        ([tensor([1, 2], (1 << 40, 1 << 40))], b"", "too many numbers"),
        ([tensor([1, 2, 3])], b"", "has 4 values, and 3 were sent"),
        ([tensor([1, [2]])], b"", "lists beside values"),
        ([tensor([[1], [2, 3, 4]])], b"", "lists of different lengths"),
        ([tensor([[1, 2, 3], [4, 5, 6]], (3, 2))], b"", r"has shape \[3, 2\], and its data \[2, 3\]"),
        ([tensor([[], []], (0, 2))], b"", r"has shape \[0, 2\], and its data \[2, 0\]"),
        ([tensor(["a"] * 4)], b"", "values of another type"),
        ([tensor([1.5] * 4, datatype="INT32")], b"", "values of another type"),
        ([tensor([True] * 4, datatype="INT32")], b"", "values of another type"),
        ([tensor([300] * 4, datatype="UINT8")], b"", "outside UINT8"),
        ([tensor([10**400] * 4)], b"", "outside FP32"),
        ([tensor([1e39] * 4)], b"", "outside FP32"),
        ([tensor([70000.0] * 4, datatype="FP16")], b"", "outside FP16"),
        ([tensor([1] * 4, datatype="FP4")], b"", "unknown datatype"),
        ([tensor([1] * 4), tensor([1] * 4)], b"", "two inputs"),
        ([tensor(binary_data_size=15)], b"0" * 15, "has 16 bytes, and 15"),
        ([tensor(binary_data_size=17)], b"0" * 16, "16 bytes are left"),
        ([tensor(binary_data_size=-1)], b"0" * 16, "16 bytes are left"),
        ([tensor([1] * 4)], b"0", "1 bytes after the last input"),
        ([tensor(shape=(1,), datatype="BYTES", binary_data_size=8)], struct.pack("<I", 9) + b"abcd", "beyond the data"),
        ([tensor([1], (1,), "BYTES")], b"", "no texts"),
    ],
)
def test_what_does_not_fit_is_said(inputs: Any, binary: bytes, problem: str):
    with pytest.raises(BadInput, match=problem):
        read_tensors(inputs, memoryview(binary))


def test_bytes_that_are_no_text_are_files_and_no_text_of_a_model():
    body = b"".join(struct.pack("<I", 1) + value for value in (b"\xff", b"a"))
    arrays = read_tensors([tensor(shape=(2,), datatype="BYTES", binary_data_size=len(body))], memoryview(body))
    assert next(iter(arrays.values())) == [b"\xff", "a"]
    with pytest.raises(BadInput, match="a text is no UTF-8"):
        tokenize_inputs(TokenizeStep(), ByteTokenizer(), [b"\xff", "a"], None)


def test_texts_are_one_axis_or_a_column():
    step = TokenizeStep()
    of = BundleSignature(inputs=[], outputs=[], programs=[], weights=[], preprocess=[step])
    for shape in ([2], [2, 1]):
        check_types(of, [{"name": step.input, "datatype": "BYTES", "shape": shape}])
    for shape in ([2, 2], [1, 2], [], [2, 1, 1]):
        with pytest.raises(ApiError, match="this model takes \\[batch\\]"):
            check_types(of, [{"name": step.input, "datatype": "BYTES", "shape": shape}])


def test_json_has_no_number_for_infinity():
    with pytest.raises(BadInput, match="not finite"):
        to_json(np.asarray([np.inf], np.float32))
