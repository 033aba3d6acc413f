"""The teacher of a distillation run: another, frozen model whose distributions the student learns.

    online   The teacher's weights are on the devices too, sharded by the rules for its axes. Every step computes its logits.
    cached   The teacher's most likely tokens are computed before the first step (`run.distillation.teacher_cache`).

A teacher is any stored model: a Hub folder, GGUF file, run directory or checkpoint. A preset cannot be a teacher, because it has no
weights. Ids must stand for the same tokens in both models, or the student would learn noise. So the tokens are compared one by one. The
two tokenizers may still split a text differently (other merges). Then the teacher reads tokens that its own tokenizer would not
produce, and the run reports this.

The teacher's path and the hashes of its files are stored with the run, so that a run cannot resume with a changed teacher by accident.
"""

import math
from functools import cached_property
from typing import Any

from argosy.checkpoint.open import open_model
from argosy.checkpoint.run_directory import RunDirectory
from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.core.progress import Say
from argosy.data.tokenizers.load import Tokenizer
from argosy.run.distillation.across import Both, begin_across, is_across, teacher_places
from argosy.run.distillation.served import ServedTeacher
from argosy.run.distillation.served import check_same_server as same_served
from argosy.run.frozen.related import check_relations
from argosy.run.frozen.stored import FrozenModel
from argosy.train.beside import split_parts
from argosy.train.objectives.distillation.teacher import ROLE
from argosy.weights.build import stored_tokenizer
from argosy.weights.model import OpenedModel

WHERE = "objective.teacher"


class Teacher(FrozenModel):
    """A teacher in a folder or file, whose weights are read on demand."""

    def __init__(self, run: Any, decided: Any, mesh: Any, tokenizer: Tokenizer | None):
        """Raises:
        BadInput, Damaged: there is no model, the model predicts no tokens, or it does not fit the student, the student's tokens or the
            rows.
        """
        self.given = run.objective.teacher
        super().__init__(run, decided, mesh, open_model(self.given))
        _check_model(run, self.config, self.given)
        self.both = Both(run, tokenizer) if is_across(run.objective) else None
        self.note = check_tokens(run, self.stored, tokenizer) if self.both is None else self.both.note

    @cached_property
    def model(self) -> Any:
        """The model without weights. Its layers run with the student's strategy, and its vocabulary is matched to the student's."""
        model = super().model
        if self.both is not None and self.both.matched is not None:
            model.matched = self.both.matched
        return model


def _check_model(run: Any, config: Any, teacher: str) -> None:
    """Checks that a model can be the teacher of a run.

    Args:
        config: the config of the model.
        teacher: the name of the model, for errors.

    Raises:
        BadInput: the model cannot be the teacher.
    """
    where = f"{WHERE}={teacher}"
    if not config.causal or config.scored:
        kind = "a reward model" if config.causal else "an encoder"
        raise BadInput(f"the teacher is {kind}, which predicts no tokens", where=where, hint="a language model")
    if is_across(run.objective):
        teacher_places(run, config.context)
    elif run.data.sequence > config.context:
        problem = f"data.sequence = {run.data.sequence:,} is longer than the teacher's context of {config.context:,} tokens"
        raise BadInput(problem, where=where, hint=f"data.sequence={config.context}")
    for ours, theirs in run.objective.layer_terms.layers.items():
        for whose, number, layers in (("the student", ours, run.model.layers), ("the teacher", theirs, config.layers)):
            if not 0 <= number < layers:
                problem = f"objective.layers.{ours}={theirs}: {whose} has {plural(layers, 'layer')}, 0 to {layers - 1}"
                raise BadInput(problem, where=where)
    check_relations(run, config, where)
    if run.objective.roles[ROLE] == "cached" and run.objective.top >= min(run.model.vocab, config.vocab):
        problem = f"objective.top = {run.objective.top}, and student and teacher have {run.model.vocab:,} and {config.vocab:,} tokens"
        raise BadInput(problem, where=where, hint="objective.logits=online has them all")
    if run.objective.needs_teacher_ids and run.model.vocab > config.vocab:
        sizes = f"the student has {run.model.vocab:,} ids, the teacher {config.vocab:,}"
        problem = f"{sizes}: reverse divergence is infinite for the others"
        raise BadInput(problem, where=where, hint=f"objective.divergence=jsd or forward, or a student with model.vocab={config.vocab}")


def check_tokens(run: Any, stored: OpenedModel, tokenizer: Tokenizer | None) -> str | None:
    """Checks that ids stand for the same tokens in both models. Returns a warning about other differences, if there are any.

    Raises:
        BadInput: the tokens differ, or the teacher has no tokenizer.
    """
    teacher, vocab = run.objective.teacher, stored.config.vocab
    where = f"{WHERE}={teacher}"
    if tokenizer is None:
        if run.model.vocab > vocab:
            problem = f"the data's tokens go up to the student's vocabulary of {run.model.vocab:,}, and the teacher has {vocab:,}"
            raise BadInput(problem, where=where, hint=f"model.vocab={vocab}")
        return None
    theirs = stored_tokenizer(stored)
    setting = f"data.tokenizer={teacher}"
    if theirs is None:
        problem = "the teacher comes without a tokenizer, so its tokens cannot be compared with the student's"
        raise BadInput(problem, where=where, hint="put its tokenizer's files into its folder")
    if theirs.fingerprint == tokenizer.fingerprint:
        return None
    if difference := differing(tokenizer, theirs):
        hint = f"objective=uld learns across tokenizers; {setting} gives this one to a student with random weights"
        raise BadInput(f"the teacher has another tokenizer than the data: {difference}", where=where, hint=hint)
    return "the teacher's tokenizer has the same tokens, but other rules to cut text or other special tokens: it sees the data's"


def differing(ours: Tokenizer, theirs: Tokenizer) -> str | None:
    """Returns a sentence that says how the tokens of two tokenizers differ; None if they do not differ."""
    if ours.vocab != theirs.vocab:
        return f"it has {theirs.vocab:,} tokens, not {ours.vocab:,}"
    # The token for text without a token has none of its own, and is shown in several ways.
    unknown = {ours.unknown, theirs.unknown}
    pairs = ((i, ours.piece(i, False), theirs.piece(i, False)) for i in range(ours.vocab) if i not in unknown)
    wrong = [(i, a, b) for i, a, b in pairs if a != b]
    if not wrong:
        return None
    i, a, b = wrong[0]
    return f"{len(wrong):,} of {ours.vocab:,} ids stand for another text, such as id {i}: {_quoted(b)}, not {_quoted(a)}"


def _quoted(piece: bytes) -> str:
    return f"`{piece.decode('utf-8', 'backslashreplace')}`"


def settle_teacher(assembly: Any, teacher: Teacher | ServedTeacher, directory: RunDirectory, say: Say) -> None:
    """Prepares the teacher before the first step: reads its weights, or fills the cache of its most likely tokens.

    Raises:
        BadInput: the teacher no longer exists, or has changed since the run began.
    """
    if isinstance(teacher, ServedTeacher):
        from argosy.run.distillation import teacher_cache

        same_served(teacher, directory)
        say(f"teacher {teacher.endpoint.model} at {teacher.given}")
        return teacher_cache.fill_teacher_cache(assembly, {}, None, say)
    described, stored = teacher.same(teacher.given, directory, say, "the teacher that this run learns from")
    if teacher.note:
        say(teacher.note)
    say(f"teacher {teacher.given}, {teacher.config.parameters():,} parameters, frozen")
    if extras := split_parts(assembly.shapes.params)[1]:
        (shape,) = (leaf.shape for leaf in extras.values())
        remark = f"{plural(math.prod(shape), 'weight')} trained beside the model"
        say(f"hidden states of {shape[0]} features are projected to its {shape[1]}: {remark}")
    if assembly.run.objective.roles[ROLE] == "cached":
        from argosy.run.distillation import teacher_cache

        return teacher_cache.fill_teacher_cache(assembly, described, stored, say)
    begin_across(assembly, say)
    assembly.frozen[ROLE] = teacher.read(stored)
