"""Distillation from a teacher with another tokenizer: adds the teacher's prompts and tokens to the student's batches."""

from typing import Any

from argosy.checkpoint.open import open_model
from argosy.core.errors import BadInput
from argosy.core.progress import Say
from argosy.data.batch import Batches
from argosy.data.distillation.across import Across, BothTokenizers
from argosy.data.rows.answered import AnsweredPrompts
from argosy.data.tokenizers.load import Tokenizer
from argosy.data.tokenizers.matched import match_tokens
from argosy.rl.rollouts.signals.teacher_tokens import TeacherPrompts
from argosy.train.objectives.distillation.gold import GOLD
from argosy.train.objectives.distillation.uld import ULD
from argosy.weights.build import stored_tokenizer

SAME = (
    "teacher and student have the same tokenizer: objective={exact} compares token by token, which is exact; {own} compares only "
    "sorted probabilities"
)


def is_across(objective: Any) -> bool:
    """Whether teacher and student may have different tokenizers."""
    return isinstance(objective, ULD)


def teacher_places(run: Any, context: int) -> int:
    """Returns the number of teacher tokens in a row.

    Args:
        context: the teacher's context, in tokens.

    Raises:
        BadInput: the setting exceeds the teacher's context.
    """
    sequence = run.objective.teacher_sequence
    if sequence is not None and sequence > context:
        problem = f"objective.teacher_sequence = {sequence:,} is longer than the teacher's context of {context:,} tokens"
        raise BadInput(problem, where=f"objective.teacher={run.objective.teacher}", hint=f"objective.teacher_sequence={context}")
    return sequence or min(2 * run.data.sequence, context)


class Both:
    """Adds the teacher's tokens to batches.

    Raises:
        BadInput: the student or the teacher has no tokenizer.
    """

    def __init__(self, run: Any, tokenizer: Tokenizer | None):
        stored, where = open_model(run.objective.teacher), f"objective.teacher={run.objective.teacher}"
        theirs = stored_tokenizer(stored)
        if tokenizer is None:
            raise BadInput("the teacher reads texts, and this data has no tokenizer", hint="data.tokenizer=FOLDER")
        if theirs is None:
            problem = "the teacher comes without a tokenizer, and it reads texts by its own"
            raise BadInput(problem, where=where, hint="put its tokenizer's files into its folder")
        if theirs.vocab > stored.config.vocab:
            problem = f"the teacher's tokenizer has {theirs.vocab:,} tokens, and the model {stored.config.vocab:,}"
            raise BadInput(problem, where=where)
        exact, current = ("gkd", "gold") if isinstance(run.objective, GOLD) else ("distill", "uld")
        note = SAME.format(exact=exact, own=current) if theirs.fingerprint == tokenizer.fingerprint else None
        self.matched = match_tokens(tokenizer, theirs) if run.objective.hybrid else None
        if self.matched is not None:
            share = f"{len(self.matched):,} of the teacher's {theirs.vocab:,} tokens"
            note = f"{share} are the student's too, and are compared as themselves"
        self.note = note
        self.across, self.places = Across(tokenizer, theirs), teacher_places(run, stored.config.context)

    def __call__(self, batches: Batches | None) -> BothTokenizers | None:
        return None if batches is None else BothTokenizers(batches, self.across, self.places)


def asking(run: Any, tokenizer: Tokenizer, prompts: AnsweredPrompts) -> TeacherPrompts | None:
    """Returns what encodes prompts for a run's teacher with the teacher's chat template. Returns None if the teacher reads the
    student's text.

    Raises:
        BadInput: the settings ask for a chat template, and the teacher has none or the data have no conversations.
    """
    chats, where = prompts.conversations, f"objective.teacher={run.objective.teacher}"
    if run.objective.template == "student":
        if not chats:
            raise BadInput("objective.template is for conversations, and this data has none", hint="leave `objective.template` out")
        return None
    if chats and not tokenizer.chat_templates:
        hint = "objective.template=student has it read the text that the student's template makes"
        raise BadInput("the teacher comes without a chat template, and prompts are conversations", where=where, hint=hint)
    return TeacherPrompts(tokenizer) if chats else None


def begin_across(assembly: Any, say: Say) -> None:
    """Lets batches with the tokens of both models report to the run's log."""
    for batches in (assembly.batches, assembly.evals):
        if isinstance(batches, BothTokenizers):
            batches.say = say
