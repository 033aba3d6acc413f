"""Records of every format, as other tools write them: what they ask and answer, and what is said of wrong ones."""

import json

import pytest

from argosy.core.errors import BadInput
from argosy.core.settings import read_settings, words_layer
from argosy.data.settings import DataSettings
from argosy.data.sources import Capped, SourceRecord, jsonl
from argosy.data.sources.find import find_source
from argosy.data.sources.folder import FileSet
from argosy.data.sources.jsonl import JsonLines
from argosy.data.sources.records import ASKED_FOR, FORMATS

HI = {"role": "user", "content": "hi"}
HO = {"role": "assistant", "content": "ho"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
# As on the Hub: OpenAI's fine-tuning files, tatsu-lab/alpaca, LLaMA-Factory's demos, trl-lib's prompts and completions.
RECORDS = {
    "text": [{"text": "once"}],
    "completion": [{"prompt": "2 + 2 =", "completion": " 4"}, {"prompt": "", "completion": "x"}],
    "messages": [{"messages": [HI, HO]}, {"messages": [{**HI, "name": None}, HO], "tools": None}],
    "alpaca": [{"instruction": "Add.", "input": "2 2", "output": "4"}, {"instruction": "Go.", "input": None, "output": "On."}],
    "sharegpt": [{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}],
    "preference": [{"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}, {"prompt": "", "chosen": "x", "rejected": "y"}],
    "kto": [{"prompt": "2 + 2 =", "completion": " 4", "label": True}],
    "stepwise": [{"prompt": "2 + 2 =", "completions": [" 4"], "labels": [True]}],
    "pair": [{"anchor": "2 + 2", "positive": "4"}],
    "triplet": [{"anchor": "2 + 2", "positive": "4", "negative": "5"}, {"anchor": "1 + 1", "positive": "2", "negative": "3"}],
    "negatives": [
        {"anchor": "2 + 2", "positive": "4", "negatives": ["5", "6"]},
        {"anchor": "1 + 1", "positive": "2", "negatives": None},
    ],
}


def write_rows(folder, rows, name="t.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(folder, *rows, **fields) -> list[SourceRecord]:
    documents = JsonLines(write_rows(folder, rows), **fields).documents()
    return [document.record for document in documents if document.record is not None]


def settings_of(path, **values) -> DataSettings:
    return DataSettings(source=str(path), **values)


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ASKED_FOR])
def test_the_first_record_tells_the_format(tmp_path, name):
    source = JsonLines(write_rows(tmp_path, RECORDS[name]))
    assert source.format == name
    assert len(list(source.documents())) == len(RECORDS[name])


def test_prompts_are_read_where_they_are_asked_for_with_all_other_columns(tmp_path):
    rows = [{"prompt": "2 + 2 =", "answer": "4", "level": None}, {"prompt": [HI], "answer": "ho", "extra": [1]}]
    text, chat = read(tmp_path, *rows, format="prompt")
    assert (text.prompt, text.messages, text.columns) == ("2 + 2 =", None, {"answer": "4", "level": None})
    assert (chat.prompt, list(chat.messages or ()), chat.columns) == (None, [HI], {"answer": "ho", "extra": [1]})
    source = JsonLines(write_rows(tmp_path, rows), format="prompt", columns={"prompt": "prompt"})
    assert len(list(source.documents())) == 2
    assert source.ignored == ()
    with pytest.raises(BadInput, match="no known format"):
        list(JsonLines(write_rows(tmp_path, [{"prompt": "x", "answer": "y"}])).documents())
    with pytest.raises(BadInput, match="a prompt that is a number"):
        read(tmp_path, {"prompt": 3}, format="prompt")


def test_numbered_negatives_are_a_list_in_their_order(tmp_path):
    row = {"anchor": "a", "positive": "p", "negative_2": "y", "negative_1": "x", "negative_10": "z", "id": 1}
    records = read(tmp_path, row, {**row, "negative_2": None}, {**row, "negative_1": None, "negative_2": " ", "negative_10": None})
    assert [[other.prompt for other in record.others] for record in records] == [["p", "x", "y", "z"], ["p", "x", "z"], ["p"]]
    (record,) = read(tmp_path, {"anchor": "a", "positive": "p", "hard": ["x"]}, columns={"negatives": "hard"})
    assert [other.prompt for other in record.others] == ["p", "x"]
    (record,) = read(tmp_path, {"anchor": "a", "positive": "p", "hard": "x"}, columns={"negative": "hard"})
    assert [other.prompt for other in record.others] == ["p", "x"]
    for wrong, why in (("x", "`negatives` is a text, not a list"), (["x", 3], "`negatives` has a number among its texts")):
        with pytest.raises(BadInput, match=why):
            read(tmp_path, {"anchor": "a", "positive": "p", "negatives": wrong})
    with pytest.raises(BadInput, match="a record without `negatives`"):
        read(tmp_path, row, {"anchor": "a", "positive": "p"})


def test_openai_and_sharegpt_write_the_same_conversation(tmp_path):
    openai = {"messages": [{"role": "system", "content": "s"}, HI, {"role": "assistant", "tool_calls": [
        {**CALL, "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}], "content": None},
        {"role": "tool", "content": "18 C"}, HO], "tools": json.dumps([TOOL])}  # fmt: skip
    sharegpt = {"system": "s", "tools": [TOOL], "conversations": [
        {"from": "human", "value": "hi"}, {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Paris"}}'},
        {"from": "observation", "value": "18 C"}, {"from": "gpt", "value": "ho"}]}  # fmt: skip
    (from_openai,) = read(tmp_path, openai)
    (other,) = read(tmp_path, sharegpt)
    assert from_openai.tools == other.tools == [TOOL]
    calls = [message.pop("tool_calls") for record in (from_openai, other) for message in record.messages if "tool_calls" in message]
    assert [call[0]["function"] for call in calls] == [CALL["function"]] * 2
    assert from_openai.messages == other.messages


def test_messages_are_read_as_the_server_reads_them(tmp_path):
    from argosy.serve.openai.chat import template_messages

    messages = [
        {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "hi", "name": None},
        {"role": "assistant", "content": None, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
    ]
    (record,) = read(tmp_path, {"messages": messages})
    assert record.messages == template_messages(messages)


def test_renamed_columns_are_read_and_the_others_are_listed(tmp_path):
    row = {"id": 7, "dialog": [{"speaker": "user", "content": "hi"}, {"speaker": "assistant", "content": "ho"}], "score": 1}
    path = write_rows(tmp_path, [row])
    words = words_layer(["columns.messages=dialog", "columns.role=speaker", f"source={path}"])
    source = find_source(read_settings(DataSettings, words).value)
    (document,) = source.documents()
    assert source.format == "messages"
    assert document.record.messages == [HI, HO]
    assert source.ignored == ("id", "score")


def test_a_weight_of_zero_and_the_messages_of_a_prompt_are_not_learned(tmp_path):
    (record,) = read(tmp_path, {"messages": [HI, {**HO, "weight": 0}, HI, {**HO, "weight": 1}]})
    assert record.learned == (True, False, True, True)
    assert record.messages == [HI, HO, HI, HO]
    (record,) = read(tmp_path, {"prompt": [HI, HO, HI], "completion": [HO]})
    assert record.learned == (False, False, False, True)


def test_alpaca_is_stanfords_text_or_messages(tmp_path):
    with_input, alone = read(tmp_path, *RECORDS["alpaca"])
    assert with_input.messages == [{"role": "user", "content": "Add.\n\n2 2"}, {"role": "assistant", "content": "4"}]
    assert with_input.prompt.endswith("### Instruction:\nAdd.\n\n### Input:\n2 2\n\n### Response:\n")
    assert with_input.completion == "4"
    assert "paired with an input" in with_input.prompt
    assert "### Input" not in alone.prompt
    (later,) = read(tmp_path, {"instruction": "b", "output": "B", "system": "s", "history": [["a", "A"]]})
    assert [message["content"] for message in later.messages] == ["s", "a", "A", "b", "B"]
    assert later.prompt is None


GOOD = {"messages": [HI, HO]}


@pytest.mark.parametrize(("rows", "fields", "says", "hint"), [
    ([GOOD, {"prompt": "a", "completion": "b"}], {}, "without `messages`", "read as `messages`; it has `prompt`, `completion`"),
    ([{"text": "a"}, GOOD], {}, "no text in the field `text`", "read as text; it has `messages`"),
    ([GOOD, {"messages": None, "id": 1}], {}, "without `messages`", "it has `id`"),
    ([{"text": "a", **GOOD}], {}, "could be `text` or `messages`", "data.format=text or data.format=messages"),
    ([{"question": "a", "answer": "b"}], {}, "no known format", "data.columns.prompt=question data.columns.completion=answer; formats"),
    ([{"input_ids": [1]}], {}, "no known format", "token ids"),
    ([{"a": 1}], {}, "no known format", "it has `a`; data.columns.text=NAME"),
    ([{"a": 1}], {}, "no known format", "sharegpt (conversations); preference (chosen, rejected); kto (prompt, completion, label)"),
    ([{"id": "7", "body": "long text"}], {}, "no known format", "if `body` is the text: data.columns.text=body; formats and"),
    ([{"id": "7", "turns": [HI, HO]}], {}, "no known format", "if `turns` are messages: data.columns.messages=turns"),
    ([{"prompt": "a"}], {}, "no known format", "data.format=prompt reads prompts alone"),
    ([{}], {}, "no known format", "it has no columns"),
    ([GOOD], {"format": "alpaca"}, "without `instruction` and `output`", "it has `messages`"),
    ([GOOD], {"columns": {"mesages": "x"}}, "unknown column `mesages`", "did you mean `messages`"),
    ([GOOD], {"columns": {"messages": "dialog"}}, "no column `dialog`", "data.columns.messages=dialog; it has `messages`"),
    ([{"text": 3}], {}, "no text in the field `text`", "it holds a number"),
    ([{"messages": []}], {}, "an empty list of messages", "role"),
    ([{"messages": "hi"}], {}, "`messages` is a text", "role"),
    ([{"messages": ["hi"]}], {}, "a message that is a text", ""),
    ([{"messages": [{"content": "x"}]}], {}, "without a role", "it has `content`"),
    ([{"messages": [HI, {**HO, "role": "assisstant"}]}], {}, "role `assisstant`", "did you mean `assistant`"),
    ([{"messages": [{"role": "user", "content": None}]}], {}, "user without content", ""),
    ([{"messages": [{**HI, "content": [{"type": "image_url"}]}]}], {}, "content of type `image_url`", "only text"),
    ([{"messages": [{**HO, "weight": 0.5}]}], {}, "of weight 0.5", "0: not learned"),
    ([{"messages": [{**HO, "tool_calls": [{"function": {}}]}]}], {}, "without a function's name", "function"),
    ([{"messages": [{**HO, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}], {}, "arguments of a tool call", ""),
    ([{**GOOD, "tools": "{"}], {}, "`tools` is a text that is not JSON", ""),
    ([{**GOOD, "tools": {"a": 1}}], {}, "`tools` is an object", "list of JSON schemas"),
    ([{**GOOD, "chat_template_kwargs": 1}], {}, "`chat_template_kwargs` is a number", "enable_thinking"),
    ([{"prompt": "a", "completion": [HO]}], {}, "a prompt that is a text, and a completion that is a list", "both"),
    ([{"conversations": [{"from": "alice", "value": "x"}]}], {}, "a message from `alice`", "human"),
    ([{"conversations": [{"from": "human"}]}], {}, "without text in `value`", ""),
    ([{"conversations": [{"from": "function_call", "value": "f()"}]}], {}, "a function call that is not JSON", "arguments"),
    ([{"conversations": [], "system": "s"}], {}, "an empty list", ""),
    ([{"instruction": 1, "output": "b"}], {}, "`instruction` is a number", ""),
    ([{"instruction": "a", "output": "b", "history": [["x"]]}], {}, "`history` is not a list of pairs", "question"),
    ([{"instruction": "a", "output": "b", "history": 3}], {}, "`history` is not a list of pairs", "question"),
    ([{"conversations": [{"from": "human", "value": "x"}], "system": 1}], {}, "`system` is a number", ""),
])  # fmt: skip
def test_a_wrong_record_is_reported_with_its_line_and_what_it_has(tmp_path, rows, fields, says, hint):
    path = write_rows(tmp_path, rows)
    with pytest.raises(BadInput) as e:
        list(JsonLines(path, **fields).documents())
    assert says in e.value.what
    assert hint in (e.value.hint or "")
    if "unknown column" not in says:
        assert f"t.jsonl:{len(rows)}" in (e.value.where or "")
    assert len(str(e.value).splitlines()) <= 5


@pytest.mark.parametrize(("name", "values", "says"), [
    ("t.txt", {"format": "messages"}, "data.format=messages is for records"),
    ("t.txt", {"columns": {"text": "body"}}, "data.columns is for records"),
    ("t.txt", {"template": "default"}, "data.template is for conversations"),
    ("text.jsonl", {"learn": "all", "template": "default"}, "data.template is for conversations"),
])  # fmt: skip
def test_settings_that_would_be_ignored_are_refused(tmp_path, name, values, says):
    path = write_rows(tmp_path, RECORDS["text"], name)
    with pytest.raises(BadInput, match=says):
        find_source(settings_of(path, **values))
    find_source(settings_of(path, learn="all"))


def test_files_of_a_folder_have_one_format(tmp_path):
    write_rows(tmp_path, [{**GOOD, "id": 1}], "a.jsonl")
    write_rows(tmp_path, [{**GOOD, "source": "x"}], "b.jsonl")
    folder = FileSet(tmp_path)
    assert folder.format == "messages"
    assert [document.record.messages for document in folder.documents()] == [[HI, HO]] * 2
    assert folder.ignored == ("id", "source")
    write_rows(tmp_path, RECORDS["alpaca"], "c.jsonl")
    with pytest.raises(BadInput, match="without `messages`") as e:
        list(FileSet(tmp_path).documents())
    assert "c.jsonl:1" in str(e.value)
    (tmp_path / "c.jsonl").rename(tmp_path / "c.txt")
    with pytest.raises(BadInput, match="a text file among files of `messages`"):
        FileSet(tmp_path).fingerprint()


def test_the_fingerprint_covers_how_records_are_read(tmp_path):
    row = {"prompt": "a", "completion": "b", "text": "c", "body": "d"}
    path = write_rows(tmp_path, [row])
    fingerprints = [
        JsonLines(path, **options).fingerprint()
        for options in ({"format": "text"}, {"format": "completion"}, {"format": "text", "columns": {"text": "body"}})
    ]
    assert len({json.dumps(fingerprint) for fingerprint in fingerprints}) == 3
    assert set(fingerprints[0]) == {"source", "source.sha256", "source.invalid"}  # as before there were formats


@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_is_read_as_its_records(tmp_path, indent):
    """Alpaca and ShareGPT are published so; as text, a model would learn the brackets."""
    path = tmp_path / "alpaca.json"
    path.write_text(json.dumps(RECORDS["alpaca"], indent=indent))
    source = find_source(settings_of(path))
    assert source.format == "alpaca"
    assert [document.record.completion for document in source.documents()] == ["4", "On."]


@pytest.mark.parametrize(("content", "says", "hint"), [
    ('[{"messages": []}]', "an empty list of messages", ""),
    ("[1]", "must be an object", ""),
    ('{"messages": []}', "must be an array", "jq -c"),
    ('{"text": "a"}\n{"text": "b"}\n', "not JSON", "ends in .jsonl"),
    ("[" + " " * 300 + "]", "more than 0 MiB", "jq -c"),
])  # fmt: skip
def test_an_array_that_cannot_be_read_is_reported(tmp_path, monkeypatch, content, says, hint):
    monkeypatch.setattr(jsonl, "ARRAY_BYTES", 200)
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(BadInput, match=says) as e:
        list(JsonLines(path).documents())
    assert "a.json" in str(e.value)
    assert hint in (e.value.hint or "")


def test_a_limit_of_bytes_never_cuts_a_record(tmp_path):
    source = JsonLines(write_rows(tmp_path, [GOOD] * 5))
    size = len(next(source.documents()).text)
    assert len(list(Capped(source, 2 * size + size // 2).documents())) == 2
