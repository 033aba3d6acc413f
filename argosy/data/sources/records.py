"""Detects the format of records (JSON objects or rows of a table), and reads them.

    format       columns
    text         text                                   a document, as in pre-training
    completion   prompt, completion                     two texts, or two lists of messages
    messages     messages                               OpenAI's: role, content, tool_calls
    alpaca       instruction, output, (input)           also system and history, as LLaMA-Factory writes them
    sharegpt     conversations                          from and value; role and content too, since many files mix the names
    preference, kto, stepwise                           `sources.preferences`
    prompt       prompt                                 a text, or a list of messages; every other column is kept, for rewards
    classification, pair, triplet, negatives, similarity, rerank   `sources.labeled`

Some formats are never detected, and must be requested with `data.format` or by the objective: `prompt`, because other formats have a
prompt too; `classification`, because its texts would be detected as documents; `similarity`; and `rerank`, which has the columns of
`triplet`.

Beside messages, a column `tools` holds the JSON schemas of functions (as a list or as JSON text), and `chat_template_kwargs` further
variables of the chat template, as in TRL. A message of an assistant with `weight` 0 is not learned, as in OpenAI's fine-tuning. A
column that is null counts as absent, because tables with optional columns become such JSON lines. If `data.columns.weights` names a
column, it holds the weight in the loss of the record, of each message, or of each token.
"""

from collections.abc import Mapping
from math import inf
from typing import Any

from argosy.core.errors import BadInput, nearest
from argosy.core.json_text import parse_json
from argosy.data.sources import SourceRecord
from argosy.data.sources.labeled import (
    NEGATIVES,
    SEQUENCES,
    classification_record,
    compared_record,
    contrasted_record,
    reranking_record,
    with_negatives,
)
from argosy.data.sources.preferences import instruction_pair, labeled_completion, preference, stepwise

Row = Mapping[str, Any]
# Format -> its required columns, and its optional columns.
FORMATS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "text": (("text",), ()),
    "completion": (("prompt", "completion"), ("tools", "chat_template_kwargs")),
    "messages": (("messages",), ("tools", "chat_template_kwargs")),
    "alpaca": (("instruction", "output"), ("input", "system", "history")),
    "sharegpt": (("conversations",), ("tools", "system", "chat_template_kwargs")),
    "preference": (
        ("chosen", "rejected"), ("prompt", "instruction", "input", "system", "margin", "tools", "chat_template_kwargs"),
    ),
    "kto": (("prompt", "completion", "label"), ("tools", "chat_template_kwargs")),
    "stepwise": (("prompt", "completions", "labels"), ()),
    "prompt": (("prompt",), ("tools", "chat_template_kwargs")),
    "classification": (("text", "label"), ("text_pair",)),
    "pair": (("anchor", "positive"), ()),
    "triplet": (("anchor", "positive", "negative"), ()),
    NEGATIVES: (("anchor", "positive", NEGATIVES), ()),
    "similarity": (("sentence1", "sentence2", "score"), ()),
    "rerank": (("anchor", "positive", "negative"), ()),
}  # fmt: skip
# The format in which all other columns are kept.
PROMPT = "prompt"
# Formats that are never detected, and must be requested.
ASKED_FOR = (PROMPT, "classification", "similarity", "rerank")
# Formats of groups of sequences -> the number of sequences per record. They take precedence over other formats in detection. The second
# sequence of KTO is the prompt with an answer to another prompt. For NEGATIVES, `data.negatives` sequences are added to this number.
GROUPS = {
    **{"preference": 2, "kto": 2, "stepwise": 1, "classification": 1, "rerank": 2},
    **{format: len(names) for format, names in SEQUENCES.items()},
    NEGATIVES: 2,
}
# Those of the formats in GROUPS whose sequences are whole texts, without an answer.
LABELED = ("classification", "rerank", NEGATIVES, *SEQUENCES)
# The keys of a message, which `data.columns` may rename too.
OF_A_MESSAGE = ("role", "content", "from", "value")
# The column of weights in the loss, which is read if `data.columns` names it, and the formats that may have it.
WEIGHTS = "weights"
WEIGHTED = ("text", "completion", "messages", "alpaca", "sharegpt")
NAMES = tuple(dict.fromkeys([*(name for needs, may in FORMATS.values() for name in needs + may), *OF_A_MESSAGE, WEIGHTS]))
ROLES = ("system", "developer", "user", "assistant", "tool")
TAGS = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "observation": "tool", "tool": "tool", "function_call": "assistant",
}  # fmt: skip
"""The roles that ShareGPT files write as `from`."""
SHOWN = 6

# Stanford's texts, as in the column `text` of tatsu-lab/alpaca (github.com/tatsu-lab/stanford_alpaca, train.py).
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)


def line_fields(line: str, where: str) -> dict[str, Any]:
    """Parses a line of JSON, and returns the columns.

    Raises:
        BadInput: the line is no JSON object.
    """
    try:
        fields = parse_json(line)
    except (ValueError, RecursionError) as e:
        raise BadInput(f"not a line of JSON: {e}"[:200], where=where) from None
    if not isinstance(fields, dict):
        raise BadInput("each line of a JSONL file must be an object", where=where, hint='like {"text": "..."}')
    return fields


class RecordReader:
    """Reads the records of one format.

    Args:
        format: a key of FORMATS, or `auto`: the format of the first record.
        columns: name of a column in the format -> its name in the file, where they differ.
    """

    def __init__(self, format: str = "auto", columns: Mapping[str, str] | None = None):
        self.columns = dict(columns or {})
        for name in self.columns:
            if name not in NAMES:
                raise BadInput(f"unknown column `{name}`", where="data.columns", hint=nearest(name, NAMES))
        self.format = None if format == "auto" else format
        self.begun = False
        # The names of columns that are not read, in order of occurrence.
        self.ignored: dict[str, None] = {}

    def row(self, fields: Row, where: str) -> dict[str, Any]:
        """The columns of a record under the names of the format. Decides the format if this is the first record.

        Raises:
            BadInput: the record is not of the format.
        """
        if self.format in (None, NEGATIVES):
            fields = with_negatives(fields, self.named(NEGATIVES))
        has = {name: value for name, value in fields.items() if value is not None}
        if not self.begun:
            self.begin(fields, has, where)
        needs, may = FORMATS[self.format or "text"]
        if missing := [name for name in needs if self.named(name) not in has]:
            raise self.other(missing, has, where)
        present = [name for name in (*needs, *may) if self.named(name) in has]
        read = {self.named(name) for name in present} | self.of_weights
        if self.format != PROMPT:
            self.ignored |= dict.fromkeys(name for name in has if name not in read)
        return {name: has[self.named(name)] for name in present}

    @property
    def of_weights(self) -> set[str]:
        """The name in the file of the column of weights, as a set; empty if no such column is read."""
        return {self.columns[WEIGHTS]} if WEIGHTS in self.columns else set()

    def weights_of(self, fields: Row, where: str) -> float | tuple[float, ...] | None:
        """The weights of a record in the loss: one number, or several. None: no column of weights is read.

        Raises:
            BadInput: the column holds neither a number nor a list of numbers, or a negative number.
        """
        if WEIGHTS not in self.columns:
            return None
        value = fields.get(column := self.columns[WEIGHTS])
        each: list[Any] = value if isinstance(value, list) else [value]
        if not all(isinstance(weight, int | float) and not isinstance(weight, bool) and 0 <= weight < inf for weight in each):
            content = "a list with something else" if isinstance(value, list) else kind(value)
            hint = "a number of 0 or more, or a list of them: one for each message, or for each token"
            raise BadInput(f"no weights in the field `{column}`: it holds {content}", where=where, hint=hint)
        return tuple(map(float, value)) if isinstance(value, list) else float(each[0])

    def named(self, name: str) -> str:
        """A column's name in the file."""
        return self.columns.get(name, name)

    def begin(self, fields: Row, has: Row, where: str) -> None:
        """Decides the format from the first record.

        Raises:
            BadInput: the record fits no format or several formats, or a renamed column is missing.
        """
        for name, column in self.columns.items():
            if name not in OF_A_MESSAGE and column not in fields:
                raise BadInput(f"no column `{column}`", where=where, hint=f"data.columns.{name}={column}; {_list_columns(has)}")
        if self.format is None:
            fits = self.fitting(has)
            if len(fits) > 1:
                problem = f"this record could be {' or '.join(f'`{candidate}`' for candidate in fits)}"
                hint = f"say which: {' or '.join(f'data.format={candidate}' for candidate in fits)}"
                raise BadInput(problem, where=where, hint=hint)
            if not fits:
                raise _unknown_format(has, where)
            self.format = fits[0]
        if WEIGHTS in self.columns and self.format not in WEIGHTED:
            problem = f"weights of tokens are for texts and conversations, and these are `{self.format}` records"
            raise BadInput(problem, where=where, hint="leave `data.columns.weights` out")
        self.begun = True

    def fitting(self, has: Row) -> list[str]:
        """The formats whose required columns a record has. Formats of groups, such as pairs, take precedence over other formats.
        Formats without a column that the settings rename are left out."""
        detected = [candidate for candidate in FORMATS if candidate not in ASKED_FOR]
        fits = [candidate for candidate in detected if all(self.named(name) in has for name in FORMATS[candidate][0])]
        renamed = {name for name in self.columns if name not in (*OF_A_MESSAGE, WEIGHTS)}
        fits = [candidate for candidate in fits if renamed <= {*FORMATS[candidate][0], *FORMATS[candidate][1]}] or fits
        if "triplet" in fits or NEGATIVES in fits:
            fits = [candidate for candidate in fits if candidate != "pair"]
        # A column `label` may hold a class. In KTO, it is a truth value.
        if "kto" in fits and not isinstance(has[self.named("label")], bool):
            fits.remove("kto")
        return [candidate for candidate in fits if candidate in GROUPS] or fits

    def other(self, missing: list[str], has: Row, where: str) -> BadInput:
        columns = " and ".join(f"`{self.named(name)}`" for name in missing)
        if self.format == "text":
            return BadInput(f"no text in the field {columns}", where=where, hint=f"this data is read as text; {_list_columns(has)}")
        problem = f"a record without {columns}"
        way_out = f"data.columns.{missing[0]}=NAME reads it from another column"
        return BadInput(problem, where=where, hint=f"this data is read as `{self.format}`; {_list_columns(has)}; {way_out}")

    def columns_read(self) -> set[str] | None:
        """The names in the file of the columns that are read, once the format is known; None: all columns are read."""
        if self.format in (PROMPT, NEGATIVES):
            # Negatives may be in any number of numbered columns.
            return None
        return {self.named(name) for names in FORMATS[self.format or "text"] for name in names} | self.of_weights

    def text(self, fields: Row, where: str) -> str:
        """The text of a record of the format `text`."""
        # Most records of text hold nothing else, and need no mapping of columns.
        text = fields.get(self.named("text")) if self.begun and len(fields) == 1 else None
        if isinstance(text, str):
            return text
        text = self.row(fields, where)["text"]
        if not isinstance(text, str):
            name = self.named("text")
            raise BadInput(f"no text in the field `{name}`", where=where, hint=f"it holds {kind(text)}")
        return text

    def record(self, fields: Row, where: str) -> SourceRecord:
        """Reads a record of any format but `text`.

        Raises:
            BadInput: a column holds something that the format does not allow.
        """
        row = self.row(fields, where)
        options = {"where": where, "tools": tools_of(row.get("tools"), where), "variables": variables_of(row, where)}
        if self.format == "alpaca":
            return alpaca(row, where)
        if self.format == "completion":
            return self.completion(row, options, where)
        if self.format == "kto":
            return labeled_completion(row, self.completion(row, options, where), where, kind)
        if self.format == "stepwise":
            return stepwise(row, where, kind)
        if self.format == PROMPT:
            return self.asking(row, fields, options, where)
        if self.format == "classification":
            return classification_record(row, where, kind)
        if self.format == "rerank":
            return reranking_record(row, where, kind)
        if self.format == NEGATIVES:
            return contrasted_record(row, where, kind)
        if self.format in SEQUENCES:
            return compared_record(row, self.format, where, kind)
        if self.format == "preference" and "instruction" in row and "prompt" not in row:
            return instruction_pair(row, alpaca, where, kind)
        if self.format == "preference":
            read = lambda conversation, column: self.messages(conversation, column, where)  # noqa: E731
            return preference(row, fields, self.named, read, options, kind)
        column = "messages" if self.format == "messages" else "conversations"
        messages, taught = self.messages(row[column], self.named(column), where)
        if row.get("system"):
            messages, taught = [system(row["system"], where), *messages], [True, *taught]
        return SourceRecord(messages=messages, learned=None if all(taught) else tuple(taught), **options)

    def asking(self, row: Row, fields: Row, options: dict[str, Any], where: str) -> SourceRecord:
        """Reads a record of the format `prompt`. All other columns of the file are kept under their own names."""
        prompt, columns_read = row["prompt"], {self.named(name) for name in (*FORMATS[PROMPT][0], *FORMATS[PROMPT][1])}
        columns = {name: value for name, value in fields.items() if name not in columns_read}
        if isinstance(prompt, str):
            return SourceRecord(where=where, prompt=prompt, columns=columns)
        if not isinstance(prompt, list):
            raise BadInput(f"a prompt that is {kind(prompt)}", where=where, hint="it is a text, or a list of messages")
        messages, _ = self.messages(prompt, self.named("prompt"), where)
        return SourceRecord(messages=messages, prompt_messages=len(messages), columns=columns, **options)

    def completion(self, row: Row, options: dict[str, Any], where: str) -> SourceRecord:
        """Reads a prompt and its completion: both are texts, or both are lists of messages."""
        prompt, answer = row["prompt"], row["completion"]
        if isinstance(prompt, str) and isinstance(answer, str):
            return SourceRecord(where=where, prompt=prompt, completion=answer)
        if not (isinstance(prompt, list) and isinstance(answer, list)):
            problem = f"a prompt that is {kind(prompt)}, and a completion that is {kind(answer)}"
            raise BadInput(problem, where=where, hint="both are texts, or both are lists of messages")
        question, _ = self.messages(prompt, self.named("prompt"), where)
        reply, taught = self.messages(answer, self.named("completion"), where)
        return SourceRecord(messages=[*question, *reply], learned=(*[False] * len(question), *taught), **options)

    def messages(self, conversation: Any, column: str, where: str) -> tuple[list[dict[str, Any]], list[bool]]:
        """Converts messages to the form that templates read. Returns them, and for each whether it is learned if it is an
        assistant's."""
        if not isinstance(conversation, list) or not conversation:
            problem = (
                "an empty list of messages" if conversation == [] else f"`{column}` is {kind(conversation)}, not a list of messages"
            )
            raise BadInput(problem, where=where, hint='like [{"role": "user", "content": "..."}, ...]')
        normalized, taught = [], []
        for place, message in enumerate(conversation):
            at = f"{where}, {column}[{place}]"
            if not isinstance(message, dict):
                raise BadInput(f"a message that is {kind(message)}", where=at)
            message = {name: value for name, value in message.items() if value is not None}
            weight = message.pop("weight", 1)
            if weight not in (0, 1):
                raise BadInput(f"a message of weight {str(weight)[:20]}", where=at, hint="0: not learned; 1: learned")
            normalized.append(self.message(message, at))
            taught.append(bool(weight))
        return normalized, taught

    def message(self, message: dict[str, Any], where: str) -> dict[str, Any]:
        """Converts one message to the keys that templates read. `message` is changed."""
        tag, value = self.named("from"), self.named("value")
        if tag in message and self.named("role") not in message:
            speaker, content = message.pop(tag), message.pop(value, None)
            if not isinstance(speaker, str) or speaker not in TAGS:
                problem = f"a message from `{str(speaker)[:40]}`"
                raise BadInput(problem, where=where, hint=f"`{tag}` is one of {', '.join(TAGS)}")
            if not isinstance(content, str):
                raise BadInput(f"a message without text in `{value}`", where=where, hint=_list_columns(message))
            if speaker == "function_call":
                return {"role": "assistant", "content": "", "tool_calls": function_call(content, where)} | message
            return {"role": TAGS[speaker], "content": content} | message
        role = message.pop(self.named("role"), None)
        if role not in ROLES:
            problem = f"a message of the role `{str(role)[:40]}`" if role is not None else "a message without a role"
            raise BadInput(problem, where=where, hint=nearest(str(role), ROLES) if role is not None else _list_columns(message))
        content = _text_of(message.pop(self.named("content"), None), where)
        if "tool_calls" in message:
            message["tool_calls"] = calls_of(message["tool_calls"], where)
        elif not content and role == "user":
            raise BadInput("a message of the user without content", where=where)
        return {"role": role, "content": content} | message


def function_call(text: str, where: str) -> list[dict[str, Any]]:
    """Parses the calls in a ShareGPT message `from: function_call`: JSON of one object or of a list of objects."""
    try:
        content = parse_json(text)
    except (ValueError, RecursionError):
        content = None
    calls = content if isinstance(content, list) else [content]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise BadInput("a function call that is not JSON", where=where, hint='like {"name": "f", "arguments": {}}')
    return calls_of([{"type": "function", "function": call} for call in calls], where)


def _text_of(content: Any, where: str) -> str:
    """The content of a message as text. Parts of type `text` are joined by line breaks, as in the server."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            name = part.get("type") if isinstance(part, dict) else kind(part)
            raise BadInput(f"a content of type `{str(name)[:32]}`", where=where, hint="only text is read; images are not built yet")
    return "\n".join(part["text"] for part in parts)


def calls_of(calls: Any, where: str) -> list[dict[str, Any]]:
    """Normalizes tool calls, with their arguments as objects. OpenAI writes arguments as JSON text, which templates would quote
    again."""
    normalized = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadInput("a tool call without a function's name", where=where, hint='like {"function": {"name": "f"}}')
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = parse_json(arguments or "{}")
            except (ValueError, RecursionError):
                raise BadInput("the arguments of a tool call are not JSON", where=where) from None
        normalized.append(call | {"function": function | {"arguments": {} if arguments is None else arguments}})
    return normalized


def tools_of(value: Any, where: str) -> list[Any] | None:
    """The JSON schemas of the functions that a conversation may call; None: there are none."""
    if isinstance(value, str):
        try:
            value = parse_json(value) if value.strip() else None
        except (ValueError, RecursionError):
            raise BadInput("`tools` is a text that is not JSON", where=where) from None
    if value is not None and not (isinstance(value, list) and all(isinstance(tool, dict) for tool in value)):
        raise BadInput(f"`tools` is {kind(value)}", where=where, hint="a list of JSON schemas of functions")
    return value or None


def variables_of(row: Row, where: str) -> dict[str, Any]:
    """Further variables of the chat template."""
    variables = row.get("chat_template_kwargs", {})
    if not isinstance(variables, dict):
        raise BadInput(f"`chat_template_kwargs` is {kind(variables)}", where=where, hint='like {"enable_thinking": false}')
    return variables


def alpaca(row: Row, where: str) -> SourceRecord:
    """Reads an Alpaca record as messages and, without earlier turns and system message, also as Stanford's text."""
    for name in ("instruction", "output", "input", "system"):
        if not isinstance(row.get(name, ""), str):
            raise BadInput(f"`{name}` is {kind(row[name])}, not a text", where=where)
    instruction, extra, output = row["instruction"], row.get("input", ""), row["output"]
    history = row.get("history") or []
    if not isinstance(history, list) or not all(pair_of_texts(turn) for turn in history):
        raise BadInput("`history` is not a list of pairs of texts", where=where, hint='like [["question", "answer"]]')
    messages = [system(row["system"], where)] if row.get("system") else []
    for question, answer in history:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    whole = f"{instruction}\n\n{extra}" if extra else instruction
    messages += [{"role": "user", "content": whole}, {"role": "assistant", "content": output}]
    text = (ALPACA_WITH_INPUT if extra else ALPACA).format(instruction=instruction, input=extra)
    alone = not history and not row.get("system")
    return SourceRecord(where=where, messages=messages, prompt=text if alone else None, completion=output if alone else None)


def pair_of_texts(turn: Any) -> bool:
    return isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn)


def system(text: Any, where: str) -> dict[str, Any]:
    if not isinstance(text, str):
        raise BadInput(f"`system` is {kind(text)}, not a text", where=where)
    return {"role": "system", "content": text}


def _unknown_format(has: Row, where: str) -> BadInput:
    """The error for a first record that fits no format: its columns, what they probably are, and the columns of each format."""
    hint = f"{_list_columns(has)}; {columns_hint(has)}; formats and the columns they need: {_format_columns()}"
    if "input_ids" in has:
        hint = "token ids are not read from files: give the text or the messages"
    return BadInput("a record of no known format", where=where, hint=hint)


def columns_hint(has: Row) -> str:
    """A hint for the settings that name the columns of a record, guessed from their names, or else from their values."""
    if pair := next((pair for pair in PAIRS if set(pair) <= has.keys()), None):
        return f"rename them: data.columns.prompt={pair[0]} data.columns.completion={pair[1]}"
    if "positive" in has and (query := next((name for name in ("query", "question", "sentence") if name in has), None)):
        return f"rename the first text: data.columns.anchor={query}"
    if "prompt" in has:
        return "data.format=prompt reads prompts alone, which a model answers itself"
    for name, value in has.items():
        if isinstance(value, list) and value and all(isinstance(message, dict) for message in value):
            return f"if `{name[:40]}` are messages: data.columns.messages={name[:40]}"
    texts = sorted((name for name, value in has.items() if isinstance(value, str)), key=lambda name: -len(has[name]))
    if texts:
        return f"if `{texts[0][:40]}` is the text: data.columns.text={texts[0][:40]}"
    return "data.columns.text=NAME reads the text from the column NAME"


# Usual names of the columns of a prompt and its completion.
PAIRS = (("question", "answer"), ("query", "response"), ("prompt", "response"), ("instruction", "response"), ("input", "output"),
         ("question", "response"), ("instruction", "completion"))  # fmt: skip


def _format_columns() -> str:
    """All formats with their required columns, for a hint."""
    return "; ".join(f"{name} ({', '.join(needs)})" for name, (needs, _) in FORMATS.items())


def _list_columns(has: Row) -> str:
    """The first columns of a record, for a hint."""
    names = ", ".join(f"`{name[:40]}`" for name in list(has)[:SHOWN])
    return f"it has {names}" if names else "it has no columns"


def kind(value: Any) -> str:
    """The type of a JSON value, as a phrase."""
    names = {str: "a text", bool: "a switch", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), "null")
