"""Encodes completions with a teacher's tokenizer, and aligns spans of teacher tokens and student tokens that stand for the same bytes.

A conversation is rendered by the teacher's own chat template, so that the teacher predicts what it was trained to predict. The
completion follows as text, and its end token becomes the token that ends a turn in that template. A prompt that is a text is encoded as
the same text.

Some completions do not become exactly the same text in the teacher's tokens. They are learned as far as they do. Metrics report the
share of completions of each kind:

    answers/unreadable   It has tokens that are no text, such as half of a character. Only the text before them is aligned.
    answers/rewritten    The teacher's tokenizer cannot write it (joined spaces, unknown characters). The text around that is aligned.
    answers/special      It has special tokens before its end. The teacher reads its own token of that role, or the name as text.
    answers/crowded      It does not fit among the teacher's tokens of its row (`teacher_sequence`).
    answers/unaligned    It has no aligned span at all. Nothing of it is learned from the teacher.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from argosy.core.errors import BadInput
from argosy.core.progress import Say
from argosy.data.batch import Batch, Fingerprint
from argosy.data.chat.conversations import CLOCK
from argosy.data.chat.template import choose_template, render
from argosy.data.distillation.across import Across, Aligned, AlignedSpan, TeacherPrompt, aligned_fields, full
from argosy.data.rows.prompts import Prompt
from argosy.rl.rollouts.completions import Trajectory
from argosy.rl.rollouts.packing import PackedPart

if TYPE_CHECKING:
    from argosy.data.tokenizers.load import Tokenizer

# Words whose end shows what ends a turn; none of them is in a template.
PROBE = "argosy probes this"

Complain = Callable[[str, str], None]
TOLD = {
    "unreadable": "an answer has tokens that are no text: from there on the teacher is not compared with it",
    "rewritten": "the teacher's tokenizer writes an answer otherwise: there it is not compared with the student",
    "special": "an answer has special tokens before its end, which the teacher reads as its own or as text",
    "unaligned": "no token of an answer ends where one of the teacher's does: nothing of it is learned from the teacher",
}


class TeacherPrompts:
    """Encodes prompts in the teacher's tokens. Call the object with a prompt. It returns None for a prompt that is a text, which the
    teacher reads as the student does.

    Raises:
        BadInput: the teacher's template refuses a conversation.
    """

    def __init__(self, tokenizer: "Tokenizer"):
        self.tokenizer = tokenizer
        self.end = self.ends()

    def __call__(self, prompt: Prompt) -> TeacherPrompt | None:
        if isinstance(prompt.content, str):
            return None
        try:
            text = self.text(prompt.content, prompt.tools, prompt.variables)
        except BadInput as error:
            raise BadInput(f"the teacher's chat template: {error.what}", where=prompt.where, hint=error.hint) from None
        return TeacherPrompt(self.tokenizer.encode(text, special=True), self.end)

    def text(self, messages: Sequence[Mapping[str, Any]], tools: Any, variables: Mapping[str, Any], ready: bool = True) -> str:
        """Renders a conversation with the teacher's chat template.

        Args:
            tools: the tools that the template shows.
            variables: further variables of the template.
            ready: whether the text ends ready for a completion (`add_generation_prompt`).
        """
        template = choose_template(self.tokenizer.chat_templates, tools=bool(tools))
        options: dict[str, Any] = {"tools": tools, "add_generation_prompt": ready, "now": CLOCK}
        return render(template, list(messages), self.tokenizer.special, **options, **variables)

    def ends(self) -> int | None:
        """The special token that ends a turn of the assistant. It is None if the template has no such token; then the student's end
        token becomes the teacher's token of the same role."""
        turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": PROBE}]
        after = self.text(turns, None, {}, ready=False).rpartition(PROBE)[2]
        ids = self.tokenizer.encode(after, special=True)
        return next((token for token in ids if token in self.tokenizer.hidden), None)


class TeacherTokens:
    """Adds the teacher's tokens to packed completions.

    Args:
        across: aligns the tokens of both tokenizers.
        places: U, the number of teacher tokens in a row.
        asking: makes the teacher's prompts; None: the teacher reads the student's text.
    """

    def __init__(self, across: Across, places: int, asking: TeacherPrompts | None):
        self.across, self.places, self.asking = across, places, asking
        asked_by = "teacher" if asking is not None else "student"
        self.fingerprint: Fingerprint = {"teacher_tokenizer": across.teacher.fingerprint, "teacher_places": places}
        self.fingerprint |= {"asked_by": asked_by}

    def __call__(self, answers: Sequence[Trajectory]) -> list[Aligned]:
        """Aligns the student's tokens of each completion with the teacher's."""
        opened = {id(answer.prompt): self.asking(answer.prompt) if self.asking is not None else None for answer in answers}
        return [self.across.answer(answer.prompt.tokens, answer.tokens, opened[id(answer.prompt)]) for answer in answers]

    def room(self, answers: Sequence[Trajectory], alignments: Sequence[Aligned], sequence: int) -> np.ndarray:
        """Computes the number of student tokens that each completion with its prompt is to occupy in a row, [B]. It is large enough
        that the teacher tokens fit into the row too.

        Args:
            sequence: the number of student tokens in a row.
        """
        theirs = [-(-min(len(alignment.teacher), self.places) * sequence // self.places) for alignment in alignments]
        return np.array([max(len(a.prompt.tokens) + len(a.tokens), b) for a, b in zip(answers, theirs, strict=True)], np.int64)

    def aligned_batch(self, rows: Batch, part: PackedPart, alignments: Sequence[Aligned], say: Say) -> Batch:
        """Returns the rows of a part with the teacher's tokens of the same completions.

        Args:
            rows: the rows of the part with their mask.
            part: the packed part.
            alignments: the alignment of every completion, by the index of the completion.
            say: called with warnings.
        """
        length = rows["tokens"].shape[1]
        # The prompt's last token has the first place of an answer.
        begins = [divmod(int(places[0]), length) for places in part.rows["places"]]
        owners = {
            (row, int(rows["segments"][row, place])): owner
            for (row, place), owner in zip(begins, part.owners.tolist(), strict=True)
            if owner >= 0
        }

        def aligned(row: int, places: np.ndarray) -> Aligned:
            return alignments[owners[row, int(rows["segments"][row, places[0]])]]

        return aligned_fields(rows, self.places, aligned, lambda tokens: say(full(self.places, tokens)))

    def numbers(self, answers: Sequence[Trajectory], alignments: Sequence[Aligned], complain: Complain) -> dict[str, float]:
        """Computes the share of completions of each kind that the module docstring lists. Reports each kind once."""
        hidden = self.across.student.hidden
        counted = {
            "unreadable": [alignment.unreadable for alignment in alignments],
            "rewritten": [alignment.rewritten for alignment in alignments],
            "special": [any(token in hidden for token in (a.tokens[:-1] if a.ended else a.tokens)) for a in answers],
            "unaligned": [not any(self.learned(group) for group in alignment.groups) for alignment in alignments],
        }
        for name, each in counted.items():
            if any(each):
                where = answers[each.index(True)].prompt.where
                complain(f"{where}: {TOLD[name]}; answers/{name} counts them", name)
        counted["crowded"] = [len(alignment.teacher) > self.places for alignment in alignments]
        return {f"answers/{name}": float(np.mean(each)) for name, each in counted.items()}

    def learned(self, group: AlignedSpan) -> bool:
        """Whether an aligned span is compared. It is if a token precedes it and if it lies within the teacher's tokens of the row."""
        return group.teacher[0] >= 1 and group.teacher[1] <= self.places
