"""A teacher's distributions as a training signal: a student completes prompts, and learns the teacher's token probabilities at its own
completions (on-policy distillation).

    completions by the student, the data or the teacher -> packed parts

Each batch has completions of one source, drawn at random: the student with probability `student_fraction` (GKD's and TRL's lambda). The
draw follows from the seed and the number of the batch, so a resumed run draws the same. Completions are constants of the loss: its
gradient does not go through the sampling (arXiv:2306.13649, section 3). A teacher with another tokenizer reads them in its own tokens
(`rl.rollouts.signals.teacher_tokens`).

Differences from TRL's GKDTrainer (1.16): the two temperatures are separate settings (`sampling`, `temperature`); completions of more
than `rollout.tokens` tokens are cut and counted, whatever their source. As in TRL, only the last turn of a conversation is learned.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from argosy.core.errors import ArgosyError, BadInput
from argosy.data.batch import Batch
from argosy.data.distillation.across import Aligned
from argosy.data.order import picked
from argosy.data.rows.answered import Answered, AnsweredPrompts
from argosy.infer.lm import LM
from argosy.infer.sampling.sample import Sampling
from argosy.rl.rollouts.batches import Engine, RolloutBatches, Signal
from argosy.rl.rollouts.completions import EVALUATION, ROLLOUT, Trajectory, sample_trajectories
from argosy.rl.rollouts.fitting import LOOKED_AT, check_sizes, length_warning, next_that_fit
from argosy.rl.rollouts.packing import PackedPart, PartShape, RolloutBatch, density, pack_trajectories
from argosy.rl.rollouts.records import ScoredTrajectories, StudentTrainer, TrajectoryRecord, cut_warning
from argosy.rl.rollouts.sampled import SampledRollout
from argosy.rl.rollouts.settings import Rollout
from argosy.rl.rollouts.signals.teacher_tokens import TeacherTokens
from argosy.train.objectives.distillation.gkd import GKD
from argosy.train.objectives.distillation.gold import GOLD

# Random streams of a teacher's answers, beside those of `rl.rollouts.completions`.
TEACHER = 2


class TeacherSignal(Signal):
    """Updates from a teacher's distributions.

    settings: the objective's settings.
    vocab: the student's vocabulary size. A teacher's may be padded further.
    reread: adds the tokens of a teacher with another tokenizer.

    Raises:
        BadInput: settings that do not fit each other or the data.
    """

    trainer: StudentTrainer

    def __init__(
        self,
        prompts: AnsweredPrompts,
        held_out: AnsweredPrompts | None,
        settings: GKD | GOLD,
        rollout: Rollout,
        batch: int,
        shape: PartShape,
        seed: int,
        vocab: int,
        reread: TeacherTokens | None = None,
    ):
        super().__init__(prompts, held_out, rollout, batch, shape, seed)
        check_teacher_settings(prompts, settings, rollout, batch, shape)
        self.settings, self.vocab, self.reread = settings, vocab, reread
        self.identity = {"own": settings.student_fraction, "others": settings.others, "sampling": settings.sampling}
        self.identity |= {} if reread is None else reread.fingerprint

    def close(self) -> None:
        for one in (self.prompts, self.held_out):
            if one is not None and one.encoder is not None:
                one.encoder.close()

    # ---------------------------------------------------------------- answers

    def whose(self, number: int) -> str:
        """The source of a rollout's completions: `own` (the student), or the value of the setting `others`."""
        drawn = hashlib.blake2b(f"{self.seed}/own/{number}".encode(), digest_size=8).digest()
        return "own" if int.from_bytes(drawn, "big") / 2**64 < self.settings.student_fraction else self.settings.others

    def records(self, number: int) -> int:
        """Number of records in a rollout. The data has one completion for each."""
        return self.batch if self.whose(number) == "data" else super().records(number)

    def sample(self, engine: Engine, seen: int) -> SampledRollout:
        made, most = SampledRollout(self.number, seen, source=self.whose(self.number)), LOOKED_AT * len(self.prompts)
        count = self.records(self.number)
        asked, place = next_that_fit(self.prompts, self.place, count, self.fitting, self.longest_prompt, most)
        with made.clock("generate_s"):
            made.trajectories = ScoredTrajectories(self.answers(engine, asked, made))
        self.number, self.place, made.place = self.number + 1, place, place
        return made

    def answers(self, engine: Engine, answered: Sequence[Answered], rollout: SampledRollout) -> list[Trajectory]:
        """The completions of a rollout."""
        how = self.rollout
        if rollout.source == "data":
            return self.data_answers(answered)
        lm, kind = (engine(), ROLLOUT) if rollout.source == "own" else (self.trainer.teacher(), TEACHER)
        sampling = Sampling(temperature=self.settings.sampling, top_k=how.top_k, top_p=how.top_p, min_p=how.min_p)
        prompts = [one.prompt for one in answered for _ in range(how.completions)]
        seed = (self.seed, kind, rollout.number)
        found = sample_trajectories(lm, prompts, how.tokens, sampling, seed, self.interrupted, how.ignore_eos)
        if not isinstance(lm, LM):
            rollout.clock.seconds["weights_s"] = lm.weights_s
            rollout.failed["rollout_lost"] = float(lm.lost)
        # The update needs the memory of its cache.
        lm.sleep()
        if (most := max(max(one.tokens) for one in found)) >= self.vocab:
            what = f"the teacher answered with token {most}, and the student has {self.vocab:,}"
            raise ArgosyError(what, hint="a student with a vocabulary as large as the teacher's, or objective.others=data")
        return found

    def data_answers(self, answered: Sequence[Answered]) -> list[Trajectory]:
        """The data's completions. Longer ones are cut and counted."""
        made = []
        for one in answered:
            assert one.answer is not None
            tokens = list(one.answer)[: self.rollout.tokens]
            whole = len(tokens) == len(one.answer)
            if not whole:
                what = f"{one.prompt.where}: an answer of {len(one.answer)} tokens is cut, as are others of more than {len(tokens)}"
                self.complain(f"{what} (rollout.tokens); answers/cut counts them", "cut")
            made.append(Trajectory(one.prompt, tokens, [True] * len(tokens), [float("nan")] * len(tokens), whole, ""))
        return made

    def fitting(self, trajectories: Sequence[Answered | str]) -> list[Answered]:
        """The records that can be learned from. The reason why others cannot is reported once."""
        out: list[Answered] = []
        for one in trajectories:
            if isinstance(one, str):
                self.complain(f"{one}: a record without an answer is passed over, as are others", "empty")
            elif len(one.prompt.tokens) > self.longest_prompt:
                self.complain(length_warning(one.prompt, self.longest_prompt), "long")
            else:
                out.append(one)
        return out

    # ---------------------------------------------------------------- their updates

    def updates(self, state: Any, rollout: SampledRollout) -> list[RolloutBatch]:
        """The updates of a rollout: its groups are divided into minibatches, once for each epoch."""
        answers, whose, how = rollout.trajectories.answers, rollout.source, self.rollout
        n = 1 if whose == "data" else how.completions
        shares = np.array_split(np.arange(len(answers)).reshape(-1, n), how.minibatches)
        read = self.reread(answers) if self.reread is not None else None
        made = [self.parts(answers, share.reshape(-1).tolist(), read, whose == "data") for share in shares if share.size]
        lengths = np.array([len(one.tokens) for one in answers], np.float32)
        number = rollout.number + 1
        numbers = {
            "rollout": float(number),
            "own": float(whose == "own"),
            "answers/tokens": float(lengths.mean()),
            "answers/tokens_max": float(lengths.max()),
            "answers/cut": float(np.mean([not one.ended for one in answers])),
            "part_density": density([part for own in made for part in own]),
            **(self.reread.numbers(answers, read, self.complain) if self.reread is not None and read is not None else {}),
            **rollout.clock.seconds,
            **rollout.failed,
        }
        if whose != "data" and numbers["answers/cut"] > 0.5:
            self.complain(f"{cut_warning(numbers['answers/cut'], number)}; raise rollout.tokens", "most cut")
        if whose != "data":
            self.keep([TrajectoryRecord(number, one.prompt.content, one.text, {}, 0.0, len(one.tokens), one.ended) for one in answers])
        return [RolloutBatch(own, numbers) for _ in range(how.epochs) for own in made]

    def parts(
        self, answers: Sequence[Trajectory], numbers: Sequence[int], read: Sequence[Aligned] | None, from_data: bool
    ) -> list[Batch]:
        """Packs some of the completions into batches.

        Args:
            numbers: the indices of the completions to pack.
            read: each completion in the tokens of a teacher with another tokenizer.
            from_data: whether the completions are the data's, whose tokens are then labels.
        """
        if self.reread is None or read is None:
            return [picked(with_mask(part, answers), self.settings.reads()) for part in pack_trajectories(answers, numbers, self.shape)]
        made = []
        for part in pack_trajectories(answers, numbers, self.shape, self.reread.room(answers, read, self.shape.sequence)):
            rows = self.reread.aligned_batch(with_mask(part, answers), part, read, lambda said: self.complain(said, "crowded"))
            made.append(picked(rows | {"labels": rows["mask"] * np.float32(from_data)}, self.settings.reads()))
        return made

    # ---------------------------------------------------------------- evaluation

    def evaluate(self, state: Any, engine: Engine, most: int) -> dict[str, float]:
        """The distance of the student from the teacher on held-out prompts: at the student's greedy completions, and at the data's, if
        it has any.
        """
        fitting = self.fitting(self.held_out(0, most))
        if not fitting:
            return {}
        lm, greedy = engine(), Sampling(temperature=0.0)
        asked = [one.prompt for one in fitting]
        answers = sample_trajectories(lm, asked, self.rollout.tokens, greedy, (self.seed, EVALUATION), self.interrupted)
        lm.sleep()
        names, every = ("loss", *self.settings.needs.metrics), range(len(answers))
        own = self.trainer.compare(state, self.parts(answers, every, self.reread and self.reread(answers), False))
        out = {f"eval_{name}": own[name] for name in names}
        if self.held_out.has_answers:
            answered = self.data_answers(fitting)
            given = self.trainer.compare(state, self.parts(answered, every, self.reread and self.reread(answered), True))
            out |= {f"eval_given_{name}": given[name] for name in (*names, "cross_entropy")}
        return out | {"eval_answers/cut": float(np.mean([not one.ended for one in answers])), "eval_prompts": float(len(answers))}


def teacher_batches(*args: Any, **named: Any) -> RolloutBatches:
    """The batches of a run that learns from a teacher: `TeacherSignal` takes these arguments."""
    return RolloutBatches(TeacherSignal(*args, **named))


def first_record(prompts: AnsweredPrompts) -> Answered:
    """The first record that can be learned from.

    Raises:
        BadInput: no record can.
    """
    for place in range(len(prompts)):
        for found in prompts(place, 1):
            if isinstance(found, Answered):
                return found
    raise BadInput("no record has an answer", where=f"data.source={prompts.source}")


def with_mask(part: PackedPart, answers: Sequence[Trajectory]) -> Batch:
    """The rows of a part, with a mask of the completions' tokens as targets."""
    mask = np.zeros(part.rows["tokens"].size, np.float32)
    for places, owner in zip(part.rows["places"], part.owners.tolist(), strict=True):
        if owner >= 0:
            mask[places[: len(answers[owner].tokens)]] = answers[owner].live
    return {**part.rows, "mask": mask.reshape(part.rows["tokens"].shape)}


def check_teacher_settings(prompts: AnsweredPrompts, settings: GKD | GOLD, rollout: Rollout, batch: int, shape: PartShape) -> None:
    """Checks that settings fit each other and the data, and that none would be ignored.

    Raises:
        BadInput: settings do not fit.
    """
    check_sizes(batch, rollout, shape, prompts.most, batch)
    if settings.student_fraction < 1 and settings.others == "data" and not prompts.has_answers:
        fraction = f"objective.student_fraction = {settings.student_fraction:g}"
        what = f"{fraction} learns from the data's answers too, and this data has prompts alone"
        hint = "objective.student_fraction=1 learns from the student's own answers alone"
        hint += ", objective.others=teacher samples the others" if isinstance(settings, GKD) else ""
        raise BadInput(what, where=f"data.source={prompts.source}", hint=hint)
    if settings.student_fraction == 0 and settings.others == "data":
        for name, default in (("top_k", 0), ("top_p", 1), ("min_p", 0), ("ignore_eos", False), ("completions", 1)):
            if getattr(rollout, name) != default:
                what = f"rollout.{name} with objective.student_fraction = 0: nothing is sampled"
                raise BadInput(what, hint="objective=distill learns from given answers")
    for name, of in (("resample", "dynamic sampling compares rewards"), ("overlong", "a reward"), ("workers", "their functions")):
        if getattr(rollout, name) != Rollout.model_fields[name].default:
            raise BadInput(f"rollout.{name} is for objectives that learn from rewards ({of})", hint=f"leave `rollout.{name}` out")
    if rollout.ahead:
        raise BadInput("rollout.ahead is not built for objectives that learn from a teacher", hint="leave `rollout.ahead` out")
    if not rollout.keep_cut:
        what = "rollout.keep_cut=false leaves cut answers out of a comparison of rewards; a teacher can be learned from at every token"
        raise BadInput(what, hint="leave `rollout.keep_cut` out")

