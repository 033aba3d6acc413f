"""JSON whose texts can be written again."""

import json

import pytest

from argosy.core.json_text import parse_json


@pytest.mark.parametrize("text", [
    '{"a": "\\ud83d\\ude42"}', '{"a": ["\\uD83D\\uDE42 and \\u00e9"]}', '"\\\\ud800 is written so"', "[1, null, true]", '"\U0001f642"',
])  # fmt: skip
def test_values_are_those_of_json(text):
    assert parse_json(text) == json.loads(text)


@pytest.mark.parametrize("text", [
    '"bad \\ud800 half"', '{"a": [{"b": "\\uDC00"}]}', '{"\\ud800": 1}', '["\\ude42\\ud83d"]', json.dumps("\ud800", ensure_ascii=False),
])  # fmt: skip
def test_half_of_a_pair_is_an_error(text):
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        parse_json(text)


def test_what_is_no_json_stays_an_error():
    with pytest.raises(ValueError, match="Expecting"):
        parse_json("{")
