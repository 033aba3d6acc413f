"""Converts tensors and parameters of gRPC messages to arrays, and back.

A request has its numbers either as bytes in `raw_input_contents`, one entry per input, or as typed lists in the inputs' `contents`.
Results are always bytes, as in Triton, because typed lists cost a Python object for each number.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from argosy.core.errors import BadInput
from argosy.predict.grpc.proto_text import ProtoFile, read_proto
from argosy.predict.protocol import InferRequest, InferResponse
from argosy.predict.tensors import DATATYPES, TEXT, checked_datatype, checked_shape, from_bytes, text_or_file, to_bytes

# The field with the numbers of each type. FP16 and BF16 have none.
CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "INT64": "int64_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    TEXT: "bytes_contents",
}


@cache
def inference_proto() -> ProtoFile:
    return read_proto(Path(__file__).with_name("inference.proto"))


@cache
def health_proto() -> ProtoFile:
    return read_proto(Path(__file__).with_name("health.proto"))


def read_request(message: Any) -> InferRequest:
    """Parses a `ModelInferRequest`.

    Raises:
        BadInput: two inputs have the same name, or data does not fit its input.
    """
    raw, inputs, arrays = message.raw_input_contents, [], {}
    if raw and len(raw) != len(message.inputs):
        raise BadInput(f"raw_input_contents has {len(raw)} parts, and there are {len(message.inputs)} inputs")
    for i, tensor in enumerate(message.inputs):
        name = tensor.name[:128]
        if name in arrays:
            raise BadInput(f"two inputs have the name `{name}`")
        if "shared_memory_region" in tensor.parameters:
            raise BadInput(f"input `{name}` is in shared memory, which is not supported", hint="send it in the request")
        shape = checked_shape(name, list(tensor.shape))
        if raw and tensor.HasField("contents"):
            raise BadInput(f"input `{name}` has contents, and the request has raw_input_contents", hint="one of them")
        arrays[name] = from_bytes(name, shape, tensor.datatype, raw[i]) if raw else _of_contents(name, shape, tensor)
        inputs.append({"name": tensor.name, "datatype": tensor.datatype, "shape": shape})
    outputs = [{"name": output.name, "parameters": parameters_of(output.parameters)} for output in message.outputs]
    return InferRequest(inputs, arrays, parameters_of(message.parameters), outputs)


def _of_contents(name: str, shape: tuple[int, ...], tensor: Any) -> np.ndarray | list[str | bytes]:
    """Converts an input whose numbers are a typed list."""
    field, datatype = CONTENTS.get(tensor.datatype), tensor.datatype
    if field is None:
        checked_datatype(name, datatype)
        raise BadInput(f"input `{name}` is {datatype}, which has no typed contents", hint="send it in raw_input_contents")
    if others := [other.name for other, _ in tensor.contents.ListFields() if other.name != field]:
        raise BadInput(f"input `{name}` is {datatype}, whose numbers are in {field}, and it has {others[0]}")
    values: Sequence[Any] = getattr(tensor.contents, field)
    expected = int(np.prod(shape, dtype=np.int64))
    if len(values) != expected:
        raise BadInput(f"input `{name}`: shape {list(shape)} has {expected} values, and {len(values)} were sent")
    if datatype == TEXT:
        return [text_or_file(text) for text in values]
    dtype = DATATYPES[datatype]
    if dtype.kind in "iu" and expected:
        limits = np.iinfo(dtype)
        if min(values) < limits.min or max(values) > limits.max:
            raise BadInput(f"input `{name}` has numbers outside {datatype}")
    return np.asarray(values, dtype).reshape(shape)


def parameters_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of parameters by name, None for an empty one."""
    values = {}
    for name, parameter in parameters.items():
        field = parameter.WhichOneof("parameter_choice")
        values[name] = None if field is None else getattr(parameter, field)
    return values


def write_response(response: InferResponse, id: str) -> Any:
    """Builds a `ModelInferResponse`."""
    version = response.version
    message = inference_proto().messages["ModelInferResponse"](
        model_name=version.model, model_version=str(version.version), id=id
    )
    for name, value in response.outputs.items():
        datatype, shape, data = to_bytes(value)
        message.outputs.add(name=name, datatype=datatype, shape=shape)
        message.raw_output_contents.append(data)
    return message
