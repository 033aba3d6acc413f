"""Reads records of preferences, labels and steps, in the formats of TRL, LLaMA-Factory and the Hub.

    preference   chosen, rejected               two answers, as texts or lists of messages; with a column `prompt`, or each with the
                                                prompt at its beginning (LLaMA-Factory's `instruction` and `input` are a prompt too)
    kto          prompt, completion, label      an answer; `label` is true for a good one
    stepwise     prompt, completions, labels    a list of the steps of one answer, as texts, and whether each is right

A column `margin` of a pair says by how much the chosen answer is better. Reward models read it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from argosy.core.errors import BadInput
from argosy.core.sequences import common_length
from argosy.data.sources import SourceRecord

Row = Mapping[str, Any]
Messages = tuple[list[dict[str, Any]], list[bool]]
# Reads a list of messages: (value of the column, name of the column) -> messages, and for each whether it is learned.
ReadMessages = Callable[[Any, str], Messages]
# Names of columns that probably hold the prompt if there is no `prompt`. If one were ignored, answers would have no prompt.
ASKING = ("question", "query", "problem", "context", "user", "input")
# The text before an answer in Anthropic's HH-RLHF.
ASSISTANT = "\n\nAssistant:"
HINT = 'like {"prompt": "...", "chosen": "...", "rejected": "..."}'


def preference(
    row: Row, has: Row, column_of: Callable[[str], str], read: ReadMessages, options: dict[str, Any], kind: Any
) -> SourceRecord:
    """Reads a pair: a record of the chosen answer, with a record of the rejected answer in `others`.

    Args:
        row: the columns under the names of the format.
        has: all columns of the file.
        column_of: name in the format -> name of the column in the file.
        read: reads a list of messages.
        options: the fields `where`, `tools` and `variables` of records.
        kind: describes a JSON value, for errors.
    """
    where, chosen, rejected = options["where"], row["chosen"], row["rejected"]
    if type(chosen) is not type(rejected) or not isinstance(chosen, str | list):
        problem = f"a chosen answer that is {kind(chosen)}, and a rejected one that is {kind(rejected)}"
        raise BadInput(problem, where=where, hint="both are texts, or both are lists of messages")
    values = {"margin": margin_of(row.get("margin"), where, kind)}
    prompt = prompt_of(row, has, column_of, where, kind)
    if isinstance(chosen, str):
        if isinstance(prompt, list):
            raise BadInput("a prompt of messages, and answers that are texts", where=where, hint=HINT)
        if prompt is None:
            prompt, chosen, rejected = _split_prompt(chosen, rejected)
        record = replace(SourceRecord(where=where, prompt=prompt, completion=chosen), values=values)
        return replace(record, others=(SourceRecord(where=where, prompt=prompt, completion=rejected),))
    chosen_messages, taught = read(chosen, column_of("chosen"))
    other, other_taught = read(rejected, column_of("rejected"))
    question: list[dict[str, Any]] = []
    if isinstance(prompt, list):
        question, _ = read(prompt, column_of("prompt"))
    elif prompt is not None:
        question = [{"role": "user", "content": prompt}]
    both = [_conversation(question, *answer, prompt is None) for answer in ((chosen_messages, taught), (other, other_taught))]
    is_open = prompt is None or starts(chosen_messages, question)
    common = common_messages([messages for messages, _ in both]) if is_open else len(question)
    if not common:
        problem = "two conversations that begin with no common prompt"
        raise BadInput(problem, where=where, hint="give the prompt: `prompt`, or the same messages at the start of both")
    records = [
        SourceRecord(messages=messages, learned=(*[False] * common, *learned[common:]), prompt_messages=common, **options)
        for messages, learned in both
    ]
    return replace(records[0], others=(records[1],), values=values)


def instruction_pair(row: Row, alpaca: Callable[[Row, str], SourceRecord], where: str, kind: Any) -> SourceRecord:
    """Reads a pair of answers to an instruction, each as an Alpaca record. `alpaca` reads such a record."""
    chosen, other = (alpaca({**row, "output": row[name]}, where) for name in ("chosen", "rejected"))
    chosen, other = (replace(record, prompt_messages=len(record.messages or ()) - 1) for record in (chosen, other))
    return replace(chosen, others=(other,), values={"margin": margin_of(row.get("margin"), where, kind)})


def _conversation(question: list[dict[str, Any]], answer: list[dict[str, Any]], taught: list[bool], whole: bool) -> Messages:
    """Joins a prompt and an answer to one conversation. Many files repeat the prompt in the messages of the answer; it is not repeated
    here.

    Args:
        whole: whether `answer` holds the whole conversation already.
    """
    if whole or starts(answer, question):
        return answer, taught
    return [*question, *answer], [*[False] * len(question), *taught]


def starts(messages: Sequence[Any], prompt: Sequence[Any]) -> bool:
    """Whether messages begin with those of a prompt. A prompt of one message may also follow a system message."""
    begins = list(messages[: len(prompt)]) == list(prompt)
    after_system = len(prompt) == 1 and len(messages) > 2 and messages[0]["role"] == "system" and messages[1] == prompt[0]
    return bool(prompt) and (begins or after_system)


def common_messages(both: Sequence[Sequence[Any]]) -> int:
    """The number of messages that two conversations have in common at their beginning, without the last message of the shorter one."""
    return min(common_length(*both), *(len(messages) - 1 for messages in both))


def prompt_of(row: Row, has: Row, column_of: Callable[[str], str], where: str, kind: Any) -> Any:
    """The prompt of a pair: a text or messages; None: both answers begin with the prompt.

    Raises:
        BadInput: the prompt is neither a text nor a list, or is probably in a column that is not read.
    """
    prompt = row.get("prompt")
    if prompt is None:
        read = {column_of(name) for name in row}
        if (column := next((name for name in ASKING if name in has and name not in read), None)) is not None:
            problem = "a preference pair without `prompt`"
            raise BadInput(problem, where=where, hint=f"if `{column}` is the prompt: data.columns.prompt={column}")
        return None
    if not isinstance(prompt, str | list):
        raise BadInput(f"`{column_of('prompt')}` is {kind(prompt)}", where=where, hint="a text, or a list of messages")
    return prompt


def _split_prompt(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Splits two texts into their common beginning, the prompt, and the rest of each. The prompt ends after the last "Assistant:" of
    HH-RLHF, or else between words."""
    common = common_length(chosen, rejected)
    speaks = chosen.rfind(ASSISTANT, 0, common)
    if speaks >= 0:
        common = speaks + len(ASSISTANT)
    elif chosen != rejected:
        # A blank belongs to the word after it, as in tokenizers.
        while common and not (chosen[common : common + 1].isspace() and rejected[common : common + 1].isspace()):
            common -= 1
    return chosen[:common], chosen[common:], rejected[common:]


def margin_of(value: Any, where: str, kind: Any) -> float:
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
        raise BadInput(f"`margin` is {kind(value)}", where=where, hint="a number: by how much chosen is better")
    return float(value)


def labeled_completion(row: Row, record: SourceRecord, where: str, kind: Any) -> SourceRecord:
    """Adds the label of a row to the record of its prompt and completion."""
    label = row["label"]
    if label not in (True, False) or isinstance(label, float):
        raise BadInput(f"`label` is {kind(label)}", where=where, hint="true for a good answer, false for a bad one")
    prompt_count = sum(1 for learned in record.learned or () if not learned) if record.messages is not None else 0
    return replace(record, values={"desirable": float(label)}, prompt_messages=prompt_count)


def stepwise(row: Row, where: str, kind: Any) -> SourceRecord:
    """Reads a prompt, the steps of an answer, and whether each step is right."""
    prompt, steps, labels = row["prompt"], row["completions"], row["labels"]
    if not isinstance(prompt, str):
        raise BadInput(f"`prompt` is {kind(prompt)}, not a text", where=where)
    if not (isinstance(steps, list) and steps and all(isinstance(step, str) and step.strip() for step in steps)):
        raise BadInput("`completions` is not a list of texts", where=where, hint='like ["First step.", "Second step."]')
    if not (isinstance(labels, list) and len(labels) == len(steps) and all(isinstance(label, bool) for label in labels)):
        problem = f"`labels` is not a list of {len(steps)} truth values, one for each step"
        raise BadInput(problem, where=where, hint="like [true, false]")
    return SourceRecord(where=where, prompt=prompt, completion="".join(f"{step}\n" for step in steps), steps=tuple(zip(steps, labels)))
