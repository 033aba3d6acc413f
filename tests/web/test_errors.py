"""The shape of an error is that of the API which owns the path."""

import json

import pytest

from argosy.web.errors import ApiError


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("/v1/chat/completions", "openai"),
        ("/v2/rerank", "openai"),
        ("/v1/messages", "anthropic"),
        ("/v2", "inference"),
        ("/v2/models/m/infer", "inference"),
        ("/v2/repository/index", "inference"),
        ("/v2/systemsharedmemory/status", "inference"),
    ],
)
def test_errors_have_the_shape_of_the_api_that_owns_the_path(path: str, form: str):
    document = json.loads(bytes(ApiError("no", param="x").response(path).body))
    assert document == {
        "openai": {"error": {"message": "no", "type": "invalid_request_error", "param": "x", "code": None}},
        "anthropic": {"type": "error", "error": {"type": "invalid_request_error", "message": "no"}},
        "inference": {"error": "no"},
    }[form]
