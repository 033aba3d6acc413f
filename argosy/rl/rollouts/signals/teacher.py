"""The training signal of on-policy distillation: a student completes prompts, and learns the teacher's token probabilities at its own
completions.

    completions by the student, the data or the teacher -> packed micro-batches

Each batch has completions of one source, which is drawn at random. It is the student with probability `student_fraction` (the lambda of
GKD and TRL). The draw depends only on the seed and the number of the batch, so a resumed run draws the same sources. The gradient of
the loss does not go through the sampling (arXiv:2306.13649, section 3). A teacher with another tokenizer reads completions in its own
tokens (`rl.rollouts.signals.teacher_tokens`).

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
from argosy.data.order import select_fields
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
    """The training signal that a teacher's distributions give.

    settings: the settings of the objective.
    vocab: the vocabulary size of the student. That of the teacher may be padded further.
    reread: adds the tokens of a teacher that has another tokenizer; None if the tokenizers are the same.

    Raises:
        BadInput: settings do not fit each other or the data.
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
        for prompts in (self.prompts, self.held_out):
            if prompts is not None and prompts.encoder is not None:
                prompts.encoder.close()

    # ---------------------------------------------------------------- answers

    def whose(self, number: int) -> str:
        """Draws the source of a rollout's completions: `own` (the student), or the value of the setting `others`."""
        digest = hashlib.blake2b(f"{self.seed}/own/{number}".encode(), digest_size=8).digest()
        return "own" if int.from_bytes(digest, "big") / 2**64 < self.settings.student_fraction else self.settings.others

    def records(self, number: int) -> int:
        """Returns the number of records in a rollout. Where the completions are the data's, each record has one completion."""
        return self.batch if self.whose(number) == "data" else super().records(number)

    def sample(self, engine: Engine, seen: int) -> SampledRollout:
        rollout, most = SampledRollout(self.number, seen, source=self.whose(self.number)), LOOKED_AT * len(self.prompts)
        count = self.records(self.number)
        records, place = next_that_fit(self.prompts, self.place, count, self.fitting, self.longest_prompt, most)
        with rollout.clock("generate_s"):
            rollout.trajectories = ScoredTrajectories(self.answers(engine, records, rollout))
        self.number, self.place, rollout.place = self.number + 1, place, place
        return rollout

    def answers(self, engine: Engine, answered: Sequence[Answered], rollout: SampledRollout) -> list[Trajectory]:
        """Returns the completions of a rollout: those of the data, or completions that the student or the teacher samples."""
        rollout_settings = self.rollout
        if rollout.source == "data":
            return self.data_answers(answered)
        lm, kind = (engine(), ROLLOUT) if rollout.source == "own" else (self.trainer.teacher(), TEACHER)
        sampling = Sampling(
            temperature=self.settings.sampling,
            top_k=rollout_settings.top_k,
            top_p=rollout_settings.top_p,
            min_p=rollout_settings.min_p,
        )
        prompts = [record.prompt for record in answered for _ in range(rollout_settings.completions)]
        seed = (self.seed, kind, rollout.number)
        trajectories = sample_trajectories(
            lm, prompts, rollout_settings.tokens, sampling, seed, self.interrupted, rollout_settings.ignore_eos
        )
        if not isinstance(lm, LM):
            rollout.clock.seconds["weights_s"] = lm.weights_s
            rollout.failed["rollout_lost"] = float(lm.lost)
        # The update needs the memory of its cache.
        lm.sleep()
        if (most := max(max(trajectory.tokens) for trajectory in trajectories)) >= self.vocab:
            problem = f"the teacher answered with token {most}, and the student has {self.vocab:,}"
            raise ArgosyError(problem, hint="a student with a vocabulary as large as the teacher's, or objective.others=data")
        return trajectories

    def data_answers(self, answered: Sequence[Answered]) -> list[Trajectory]:
        """Returns the completions of the data. Completions that are longer than `rollout.tokens` are cut."""
        trajectories = []
        for record in answered:
            assert record.answer is not None
            tokens = list(record.answer)[: self.rollout.tokens]
            whole = len(tokens) == len(record.answer)
            if not whole:
                problem = f"{record.prompt.where}: an answer of {len(record.answer)} tokens is cut"
                others = f"as are others of more than {len(tokens)} (rollout.tokens)"
                self.complain(f"{problem}, {others}; answers/cut counts them", "cut")
            trajectories.append(Trajectory(record.prompt, tokens, [True] * len(tokens), [float("nan")] * len(tokens), whole, ""))
        return trajectories

    def fitting(self, trajectories: Sequence[Answered | str]) -> list[Answered]:
        """Selects the records that can be learned from. The reason why others cannot is reported once."""
        out: list[Answered] = []
        for record in trajectories:
            if isinstance(record, str):
                self.complain(f"{record}: a record without an answer is passed over, as are others", "empty")
            elif len(record.prompt.tokens) > self.longest_prompt:
                self.complain(length_warning(record.prompt, self.longest_prompt), "long")
            else:
                out.append(record)
        return out

    # ---------------------------------------------------------------- their updates

    def updates(self, state: Any, rollout: SampledRollout) -> list[RolloutBatch]:
        """Makes the updates of a rollout. Its groups are divided into `minibatches` updates, which are repeated for each epoch."""
        answers, whose, rollout_settings = rollout.trajectories.answers, rollout.source, self.rollout
        n = 1 if whose == "data" else rollout_settings.completions
        shares = np.array_split(np.arange(len(answers)).reshape(-1, n), rollout_settings.minibatches)
        read = self.reread(answers) if self.reread is not None else None
        minibatches = [self.parts(answers, share.reshape(-1).tolist(), read, whose == "data") for share in shares if share.size]
        lengths = np.array([len(answer.tokens) for answer in answers], np.float32)
        number = rollout.number + 1
        numbers = {
            "rollout": float(number),
            "own": float(whose == "own"),
            "answers/tokens": float(lengths.mean()),
            "answers/tokens_max": float(lengths.max()),
            "answers/cut": float(np.mean([not answer.ended for answer in answers])),
            "part_density": density([part for minibatch in minibatches for part in minibatch]),
            **(self.reread.numbers(answers, read, self.complain) if self.reread is not None and read is not None else {}),
            **rollout.clock.seconds,
            **rollout.failed,
        }
        if whose != "data" and numbers["answers/cut"] > 0.5:
            self.complain(f"{cut_warning(numbers['answers/cut'], number)}; raise rollout.tokens", "most cut")
        if whose != "data":
            self.keep([
                TrajectoryRecord(number, answer.prompt.content, answer.text, {}, 0.0, len(answer.tokens), answer.ended)
                for answer in answers
            ])
        return [RolloutBatch(minibatch, numbers) for _ in range(rollout_settings.epochs) for minibatch in minibatches]

    def parts(
        self, answers: Sequence[Trajectory], numbers: Sequence[int], read: Sequence[Aligned] | None, from_data: bool
    ) -> list[Batch]:
        """Packs some of the completions into micro-batches.

        Args:
            answers: all completions.
            numbers: the indices of the completions to pack.
            read: the alignment of each completion with the tokens of a teacher that has another tokenizer; None if the tokenizers are
                the same.
            from_data: whether the completions are those of the data. Their tokens are then labels.
        """
        if self.reread is None or read is None:
            parts = pack_trajectories(answers, numbers, self.shape)
            return [select_fields(with_mask(part, answers), self.settings.reads()) for part in parts]
        batches = []
        for part in pack_trajectories(answers, numbers, self.shape, self.reread.room(answers, read, self.shape.sequence)):
            rows = self.reread.aligned_batch(with_mask(part, answers), part, read, lambda message: self.complain(message, "crowded"))
            batches.append(select_fields(rows | {"labels": rows["mask"] * np.float32(from_data)}, self.settings.reads()))
        return batches

    # ---------------------------------------------------------------- evaluation

    def evaluate(self, state: Any, engine: Engine, most: int) -> dict[str, float]:
        """Computes the distance of the student from the teacher on held-out prompts, at the student's greedy completions, and also at
        the data's completions if there are any.
        """
        fitting = self.fitting(self.held_out(0, most))
        if not fitting:
            return {}
        lm, greedy = engine(), Sampling(temperature=0.0)
        prompts = [record.prompt for record in fitting]
        answers = sample_trajectories(lm, prompts, self.rollout.tokens, greedy, (self.seed, EVALUATION), self.interrupted)
        lm.sleep()
        names, every = ("loss", *self.settings.needs.metrics), range(len(answers))
        student_metrics = self.trainer.compare(state, self.parts(answers, every, self.reread and self.reread(answers), False))
        out = {f"eval_{name}": student_metrics[name] for name in names}
        if self.held_out.has_answers:
            answered = self.data_answers(fitting)
            data_metrics = self.trainer.compare(state, self.parts(answered, every, self.reread and self.reread(answered), True))
            out |= {f"eval_given_{name}": data_metrics[name] for name in (*names, "cross_entropy")}
        return out | {"eval_answers/cut": float(np.mean([not answer.ended for answer in answers])), "eval_prompts": float(len(answers))}


def teacher_batches(*args: Any, **kwargs: Any) -> RolloutBatches:
    """Makes the batches of a run that learns from a teacher. The arguments are those of `TeacherSignal`."""
    return RolloutBatches(TeacherSignal(*args, **kwargs))


def first_record(prompts: AnsweredPrompts) -> Answered:
    """Returns the first record that can be learned from.

    Raises:
        BadInput: there is no such record.
    """
    for place in range(len(prompts)):
        for record in prompts(place, 1):
            if isinstance(record, Answered):
                return record
    raise BadInput("no record has an answer", where=f"data.source={prompts.source}")


def with_mask(part: PackedPart, answers: Sequence[Trajectory]) -> Batch:
    """Returns the rows of a part with an array `mask`, which is 1 where the target is a token of a completion."""
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
        problem = f"{fraction} learns from the data's answers too, and this data has prompts alone"
        hint = "objective.student_fraction=1 learns from the student's own answers alone"
        hint += ", objective.others=teacher samples the others" if isinstance(settings, GKD) else ""
        raise BadInput(problem, where=f"data.source={prompts.source}", hint=hint)
    if settings.student_fraction == 0 and settings.others == "data":
        for name, default in (("top_k", 0), ("top_p", 1), ("min_p", 0), ("ignore_eos", False), ("completions", 1)):
            if getattr(rollout, name) != default:
                problem = f"rollout.{name} with objective.student_fraction = 0: nothing is sampled"
                raise BadInput(problem, hint="objective=distill learns from given answers")
    for name, of in (("resample", "dynamic sampling compares rewards"), ("overlong", "a reward"), ("workers", "their functions")):
        if getattr(rollout, name) != Rollout.model_fields[name].default:
            raise BadInput(f"rollout.{name} is for objectives that learn from rewards ({of})", hint=f"leave `rollout.{name}` out")
    if rollout.ahead:
        raise BadInput("rollout.ahead is not built for objectives that learn from a teacher", hint="leave `rollout.ahead` out")
    if not rollout.keep_cut:
        problem = "rollout.keep_cut=false leaves cut answers out of a comparison of rewards; "
        problem += "a teacher can be learned from at every token"
        raise BadInput(problem, hint="leave `rollout.keep_cut` out")

