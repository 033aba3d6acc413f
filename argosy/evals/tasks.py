"""Defines the tasks: their prompts, and how answers are judged.

The prompts of multiple choice, LAMBADA, MMLU, GSM8K and BBH are those of EleutherAI's lm-evaluation-harness, so results can be compared
with published results on the same rows.
"""

from dataclasses import dataclass
from string import Formatter
from typing import Any, Literal

Kind = Literal[
    "perplexity", "answers", "choice", "continuation", "generation", "ifeval", "similarity", "pairs", "retrieval"
]
PERPLEXITY, RETRIEVAL = "perplexity", "retrieval"
# The kinds of tasks that evaluate vectors of texts.
OF_VECTORS = ("similarity", "pairs", "retrieval")


@dataclass(frozen=True)
class Task:
    """One task.

    name: the name of the task.
    kind: the kind of evaluation.
    layout: the layout of the rows, a key of `rows.LAYOUTS`.
    about: a short description.
    prompt: the question, with names of fields of the row in braces.
    before: the introduction before the examples, with names of fields in braces.
    shots: the default number of examples.
    examples: the name of the file from which examples are drawn, if it exists. Otherwise they are drawn from the rows of the task.
    alike: the name of a field whose value must be the same in examples and question; empty: there is none.
    answer: the field with the right answer, for generated answers.
    stop: the strings that end a generated answer.
    max_tokens: the largest number of tokens in a generated answer.
    strict: the regular expression that finds the answer for the strict comparison; empty: the whole text is the answer.
    flexible: the regular expression that finds the answer for the flexible comparison; empty: the whole text is the answer.
    last: whether the last match counts, and not the first.
    """

    name: str
    kind: Kind
    layout: str
    about: str
    prompt: str = ""
    before: str = ""
    shots: int = 0
    examples: str = ""
    alike: str = ""
    answer: str = ""
    stop: tuple[str, ...] = ("\n",)
    max_tokens: int = 64
    strict: str = ""
    flexible: str = ""
    last: bool = False

    @property
    def fields(self) -> list[str]:
        """The names of the fields of a row that the prompt and the introduction use."""
        return [field for part in (self.prompt, self.before) for _, field, _, _ in Formatter().parse(part) if field]


NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?"
QUESTION = "{query}\nAnswer:"
LETTERS = "The following are multiple choice questions (with answers) about {subject}.\n\n"
_BBH = {"kind": "generation", "layout": "input-target", "prompt": "Q: {input}\nA:", "answer": "target", "shots": 3}


def _choice(name: str, about: str, prompt: str = QUESTION, layout: str = "choices", **more: Any) -> Task:
    return Task(name, "choice", layout, about, prompt, **more)


def _bbh(name: str, about: str, before: str, flexible: str, **more: Any) -> Task:
    return Task(f"bbh_{name}", about=about, before=f"{before}\n\n", flexible=flexible, **_BBH, **more)


_ALL = [
    Task(PERPLEXITY, "perplexity", "text", "loss a token of any text"),
    _choice("arc_easy", "grade-school science questions"),
    _choice("arc_challenge", "the harder ones of them"),
    _choice("boolq", "yes or no, from a passage"),
    _choice("commonsense_qa", "lettered choices", "{query}"),
    _choice("copa", "cause or effect", "{query}"),
    _choice("openbook_qa", "elementary science", "{query}"),
    _choice("piqa", "physical common sense"),
    _choice("mmlu_dev", "57 subjects, lettered choices", "{question}", "letters", before=LETTERS, alike="subject"),
    _choice("winograd_wsc", "which noun a pronoun means", "", "options"),
    _choice("winogrande", "which noun fills the gap", "", "options"),
    Task("lambada_openai", "continuation", "continuation", "the last word of a passage", "{context}"),
    Task(
        "simple_arithmetic",
        "generation",
        "continuation",
        "sums, differences, products",
        "{context}",
        answer="continuation",
        max_tokens=16,
        flexible=NUMBER,
    ),
    Task(
        "gsm8k",
        "generation",
        "question-answer",
        "grade-school word problems",
        "Question: {question}\nAnswer:",
        shots=5,
        examples="gsm8k_train",
        answer="answer",
        stop=("Question:", "\n\n"),
        max_tokens=256,
        strict=rf"#### ({NUMBER})",
        flexible=NUMBER,
        last=True,
    ),
    Task(
        "svamp",
        "generation",
        "context-answer",
        "one-step word problems",
        "Question: {context}\nAnswer:",
        shots=5,
        answer="answer",
        max_tokens=32,
        flexible=NUMBER,
        last=True,
    ),
    _bbh(
        "boolean_expressions",
        "True or False",
        "Evaluate the result of a random Boolean expression.",
        r"\b(?:True|False)\b",
        max_tokens=8,
    ),
    _bbh("date_understanding", "lettered dates", "Infer the date from context.", r"\([A-Z]\)", max_tokens=16),
    _bbh("multistep_arithmetic_two", "nested sums", "Solve multi-step arithmetic problems.", NUMBER, max_tokens=16),
    _bbh(
        "navigate",
        "Yes or No",
        "Given a series of navigation instructions, determine whether one would end up back at the starting point.",
        r"\b(?:Yes|No|yes|no)\b",
        max_tokens=8,
    ),
    _bbh("word_sorting", "words in order", "Sort a list of words.", "words", max_tokens=160),
    Task(
        "ifeval",
        "ifeval",
        "instructions",
        "instructions that a program can check",
        "{prompt}",
        stop=(),
        max_tokens=1280,
    ),
    Task("sts", "similarity", "scored-pairs", "how alike two sentences are, by their vectors"),
    Task("pairs", "pairs", "labeled-pairs", "whether two sentences belong together, by their vectors"),
    Task(RETRIEVAL, "retrieval", "query", "searches of a corpus by vectors"),
]
TASKS: dict[str, Task] = {task.name: task for task in _ALL}

# The task for a file of each layout, if the file belongs to no known task.
PLAIN: dict[str, Task] = {
    "instructions": TASKS["ifeval"],
    "options": _choice("", "", "", "options"),
    "choices": _choice("", "", "{query}"),
    "letters": _choice("", "", "{question}", "letters"),
    "continuation": TASKS["lambada_openai"],
    "input-target": Task("", "generation", "input-target", "", "{input}", answer="target"),
    "question-answer": Task("", "generation", "question-answer", "", "Question: {question}\nAnswer:", answer="answer"),
    "context-answer": Task("", "generation", "context-answer", "", "{context}", answer="answer"),
    "scored-pairs": TASKS["sts"],
    "labeled-pairs": TASKS["pairs"],
    "text": TASKS[PERPLEXITY],
}
# The task for files of training records. Their layouts are the formats of `data.sources.records`.
ANSWERS = Task("", "answers", "", "loss a token of the answers that a file has")
