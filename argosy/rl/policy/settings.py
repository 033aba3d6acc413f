"""The settings of policies that learn from rewards, without jax. Each is also the objective's function (`rl.policy.objective`).

    name             advantages                      loss of a token          mean over        source
    ppo              against a critic's values       PPO's, clipped           tokens           arXiv:1707.06347
    grpo             reward against its group        PPO's, clipped           answers          arXiv:2402.03300
    dr_grpo          the same, not divided by std    PPO's                    constant length  arXiv:2503.20783
    dapo             as grpo                         PPO's, clip-higher       tokens           arXiv:2503.14476
    gspo             as grpo                         ratio of the sequence    answers          arXiv:2507.18071
    cispo            as grpo                         bounded weights          tokens           arXiv:2506.13585
    rloo             leave one out                   REINFORCE                answers, summed  arXiv:2402.14740
    reinforce_pp     normalized over the batch       PPO's                    tokens           arXiv:2501.03262
    remax            reward against the greedy one   REINFORCE                answers, summed  arXiv:2310.10505
    gpg              against its group, not divided  REINFORCE                tokens           arXiv:2504.02546
    opo              against a length-weighted mean  REINFORCE                tokens           arXiv:2505.23585

They are one set of parts with different defaults, so any part can be exchanged: `objective=grpo objective.scale=none`. What a name
means beyond these parts is in `rollout` (dynamic sampling, punishment of overlong answers), which its recipe sets.
"""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from argosy.core.settings import Also, BrokenRules, MayChange, Settings
from argosy.train.settings import OfTokens

Advantage = Literal["group", "leave_one_out", "batch", "group_batch", "greedy", "useful", "length"]
TokenLoss = Literal["ppo", "gspo", "cispo", "reinforce"]
Average = Literal["tokens", "answers", "sums"]
# Settings of rollouts that decide where they are sampled and how they are computed, not what they are.
NOT_MADE = ("workers", "devices", "processes", "stuck", "share_prompts")


class Correction(Settings):
    """Importance weights for the difference between the engine's log-probabilities and the trainer's (`rl.policy.correction`)."""

    outside: Literal["truncate", "mask", "off"] = "truncate"
    """What happens to weights out of bounds. truncate: they are moved to the bound (TIS); mask: their tokens are left out of the loss
    (IcePop, arXiv:2510.18855); off: no weights. The differences are logged either way."""
    level: Annotated[Literal["token", "sequence"], Also("vllm_importance_sampling_mode")] = "token"
    """One weight a token, or one an answer, the product over its tokens."""
    lowest: float = Field(0.0, ge=0, le=1)
    """Lower bound of a weight."""
    highest: Annotated[float, Also("vllm_importance_sampling_cap")] = Field(2.0, ge=1)
    """Upper bound of a weight; 2 as in verl."""


class Credit(Settings):
    """Which turns of an answer a reward is credited to, where an environment rewards turns (`rl.policy.turns`)."""

    by: Literal["answer", "to_go", "mixed"] = "answer"
    """answer: rewards of all turns are added, and the sum is credited to every token of the answer. to_go: a turn is credited with its
    reward and those after it, compared with the same turn of the other answers to the prompt; with a critic, rewards stand at the last
    token of their turn. mixed: every turn is credited with the outcome, which is the reward of the last turn and those of functions,
    and each turn before the last also with its own reward (MT-GRPO, arXiv:2505.11821)."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Of `to_go`: discount of a reward for each turn that it is away. Below 1 a turn is credited less with what comes late."""
    weight: Annotated[float, Also("turn_advantage_coef", "step_advantage_w")] = Field(1.0, gt=0)
    """Of `mixed`: weight of the turn's own advantage beside that of the outcome."""

    @model_validator(mode="after")
    def _apply(self) -> "Credit":
        for name, by in (("gamma", "to_go"), ("weight", "mixed")):
            if self.by != by and getattr(self, name) != 1:
                raise ValueError(f"{name} = {getattr(self, name):g} does not apply: it is for by={by}, not {self.by}")
        return self


# Rows of a part, unless there are more devices.
LEAST_ROWS = 4


class Critic(Settings):
    """A model of its own that learns what reward to expect at each token: a copy of the first weights with a head of one score."""

    gamma: float = Field(1.0, gt=0, le=1)
    """Discount of a reward for each token that it is away. 1: a reward at the end is worth as much to a long answer as to a short
    one."""
    lam: Annotated[float, Also("gae_lambda")] = Field(0.95, ge=0, le=1)
    """Of generalized advantage estimation (arXiv:1506.02438): 1 trusts the rewards, 0 the critic. 0.95 as in PPO's paper and TRL."""
    weight: Annotated[float, Also("vf_coef", "value_loss_coef")] = Field(0.1, gt=0)
    """Weight of the critic's loss. With Adam it decides only the share of the gradient's norm that clipping sees; 0.1 as in TRL."""
    rate: float = Field(10.0, gt=0)
    """The critic's learning rate as a multiple of the policy's; verl's examples use 1e-5 and 1e-6."""
    clip: Annotated[float | None, Also("cliprange_value", "value_clip")] = Field(0.2, gt=0)
    """How far a value may move from that before the update, in units of the return (arXiv:1707.06347). None: no clipping."""


class Policy(OfTokens):
    """A policy that learns from rewards of answers that it gave itself."""

    temperature: float = Field(1.0, gt=0)
    """Divides the logits, of sampling and of the log-probabilities that are trained alike: the policy is the distribution that is
    sampled. Below 1 answers are more alike."""
    advantages: Annotated[Advantage, Also("advantage_estimator", "adv_estimator")] = "group"
    """What a reward is compared with (`rl.algorithms`). group: the mean of its group, see `scale`; leave_one_out: the mean of the
    others of its group; batch: the mean of all answers of the rollout; group_batch: that of its group, then divided by the std
    of the batch; greedy: the reward of the greedy answer to the prompt; useful: the mean of its group, times all groups over those
    whose rewards differ; length: the mean of its group weighted by length."""
    scale: Annotated[Literal["group", "batch", "none"], Also("scale_rewards", "norm_adv_by_std_in_grpo")] = "group"
    """What `advantages: group` are divided by: the standard deviation of the group's rewards, of all rewards of the rollout, or
    nothing."""
    normalize: Annotated[Literal["sum", "each"], Also("multi_objective_aggregation")] = "sum"
    """Of several rewards: sum adds them by weight, then compares; each compares every reward with its group first, then adds
    (GDPO, arXiv:2601.05242), so that a reward of small range counts too. `each` is for `advantages: group` only."""
    loss: Annotated[TokenLoss, Also("importance_sampling_level")] = "ppo"
    """The loss of a token (`rl.algorithms`). ppo: clipped ratio; gspo: clipped ratio of the whole answer, which moves less (`low` 3e-4,
    `high` 4e-4); cispo: REINFORCE with bounded weights (`low` 0, `high` 5); reinforce: no ratio, for one update a rollout."""
    low: Annotated[float, Also("epsilon", "clip_ratio", "clip_ratio_low")] = Field(0.2, ge=0)
    """Lower clip: the ratio stops mattering below 1 - low. Of `cispo` the lower bound of the weight itself."""
    high: Annotated[float, Also("epsilon_high", "clip_ratio_high")] = Field(0.2, ge=0)
    """Upper clip: the ratio stops mattering above 1 + high. Of `cispo` the upper bound of the weight itself."""
    dual: Annotated[float | None, Also("delta", "clip_ratio_c")] = Field(None, gt=1)
    """Bounds the loss of bad tokens whose ratio has exploded (dual-clip PPO, arXiv:1912.09729, uses 3). None: off, as in the papers."""
    average: Annotated[Average, Also("loss_agg_mode", "loss_type")] = "answers"
    """What the loss is a mean over. answers: every answer weighs the same; tokens: every token does; sums: the sum over the tokens
    of an answer divided by the constant `rollout.tokens`, then the mean over answers."""
    kl: Annotated[float, Also("beta", "kl_coef", "kl_loss_coef")] = Field(0.0, ge=0)
    """Weight of the KL divergence from the first weights, as a loss. 0: none, and no reference is computed, as in TRL and in DAPO's
    paper; GRPO's paper uses 0.04."""
    kl_estimator: Annotated[Literal["k1", "k2", "k3", "k3+"], Also("kl_loss_type", "kl_penalty")] = "k3+"
    """How the divergence is estimated (`rl.policy.kl`). k3+: k3's value with the right gradient. As a loss k1 has no gradient on
    average."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the penalty stands. loss: each token's, with a gradient of its own; reward: subtracted from the reward (PPO, RLOO,
    REINFORCE++), estimated by k1, which is right there."""
    entropy: Annotated[float, Also("entropy_coef", "entropy_coeff")] = Field(0.0, ge=0)
    """Weight of the entropy bonus. Above 0 the whole distribution of every token is computed once more."""
    correction: Correction = Correction()
    """For the difference between engine and trainer."""
    credit: Credit = Credit()
    """Of answers with several turns: which turns a reward is credited to."""

    critic: Critic | None = None
    """The critic. None: advantages compare rewards alone."""

    rows_per_group: ClassVar[int] = 1
    trains_on: ClassVar[tuple[str, ...]] = ("prompt",)
    # Its batches are rollouts: answers that the engine samples with the weights of the moment.
    on_policy: ClassVar[bool] = True

    @model_validator(mode="after")
    def _parts_fit(self) -> "Policy":
        if broken := [*self._broken(), *self._broken_by_credit(), *self._idle()]:
            raise BrokenRules(broken)
        return self

    def _broken(self) -> Iterator[str]:
        """The rules between the parts that do not hold."""
        if self.normalize == "each" and self.advantages != "group":
            yield f"normalize=each is for advantages=group, not {self.advantages}"
        if self.scale != "group" and self.advantages != "group":
            yield f"scale={self.scale} is for advantages=group, not {self.advantages}"
        if self.kl and self.kl_in == "loss" and self.kl_estimator == "k1":
            yield "kl_estimator=k1 has no gradient on average, so it penalizes nothing: k3+ or k2 do"
        if self.loss == "cispo" and not self.low <= 1 <= self.high:
            yield f"low = {self.low:g}, high = {self.high:g}: with loss=cispo they bound the ratio itself, such as 0 and 5"
        if self.loss in ("ppo", "gspo") and self.low > 1:
            yield f"low = {self.low:g} is above 1: ratios are clipped at 1 - low"
        if self.dual is not None and self.loss != "ppo":
            yield f"dual is for loss=ppo, not {self.loss}"

    def _broken_by_credit(self) -> Iterator[str]:
        """Why turns cannot be credited apart."""
        by = self.credit.by
        if by == "answer":
            return
        if self.critic is not None:
            if by == "mixed":
                yield "credit.by=mixed compares answers with each other, not with a critic: credit.by=to_go does"
            if self.credit.gamma != 1:
                yield f"credit.gamma = {self.credit.gamma:g} does not apply: with a critic it is critic.gamma, of tokens"
        elif self.advantages != "group":
            what = f"credit.by={by} is for objectives that compare within groups (grpo, dr_grpo, dapo, gspo, cispo) and for ppo"
            yield f"{what}: {self.advantages} needs one reward an answer"
        if self.normalize == "each":
            yield f"normalize=each compares one number an answer of every reward: it is for credit.by=answer, not {by}"

    def _idle(self) -> Iterator[str]:
        """The settings that mean nothing here and are not the default."""
        idle: dict[str, tuple[str, ...]] = {}
        if self.critic is not None:
            idle["with a critic the advantages are against its values"] = ("advantages", "scale", "normalize")
        if self.loss == "reinforce":
            idle["loss=reinforce has no ratio to clip"] = ("low", "high")
        if not self.kl:
            idle["there is no KL penalty: objective.kl is 0"] = ("kl_estimator",)
        elif self.kl_in == "reward":
            idle["in the reward the divergence is estimated by k1, which is right there"] = ("kl_estimator",)
        for why, names in idle.items():
            for name in names:
                value = getattr(self, name)
                if value != type(self).model_fields[name].default:
                    yield f"{name} = {value} does not apply: {why}"

    @property
    def reference(self) -> str | None:
        """Where the reference's log-probabilities come from: they are computed for each rollout. None: there is no KL penalty."""
        return "rollout" if self.kl else None

    def reads(self) -> Any:
        from argosy.rl.policy.objective import fields_of

        return fields_of(self)

    def __call__(self, models: Any, batch: Any, key: Any) -> Any:
        """Computes the `train.objectives.Loss`."""
        from argosy.rl.policy.objective import loss

        return loss(self, models, batch)


class PPO(Policy):
    """Proximal policy optimization with a critic (arXiv:1707.06347; of language models: arXiv:2203.02155)."""

    average: Average = "tokens"
    kl: float = Field(0.05, ge=0)
    kl_in: Literal["loss", "reward"] = "reward"
    critic: Critic | None = Critic()

    @model_validator(mode="after")
    def _has_critic(self) -> "PPO":
        if self.critic is None:
            raise ValueError("critic is missing: PPO without one is objective=grpo, or objective=reinforce_pp")
        return self


class GRPO(Policy):
    """Group relative policy optimization (arXiv:2402.03300): rewards are compared with those of other answers to the same prompt."""


class DrGRPO(Policy):
    """GRPO without its two biases (arXiv:2503.20783): advantages are not divided by the std, answers not by their length."""

    scale: Literal["group", "batch", "none"] = "none"
    average: Average = "sums"


class DAPO(Policy):
    """Decoupled clip and dynamic sampling (arXiv:2503.14476): clip-higher, and a mean over tokens. The recipe `dapo` adds dynamic
    sampling and the punishment of overlong answers."""

    high: float = Field(0.28, ge=0)
    average: Average = "tokens"


class GSPO(Policy):
    """Group sequence policy optimization (arXiv:2507.18071): the ratio of the whole answer is clipped, at the paper's 3e-4 and 4e-4."""

    loss: TokenLoss = "gspo"
    low: float = Field(3e-4, ge=0)
    high: float = Field(4e-4, ge=0)


class CISPO(Policy):
    """Clipped importance sampling (MiniMax-M1, arXiv:2506.13585): no token loses its gradient. The paper tunes the upper bound; 5 as
    in TRL."""

    loss: TokenLoss = "cispo"
    low: float = Field(0.0, ge=0)
    high: float = Field(5.0, ge=0)
    average: Average = "tokens"


class RLOO(Policy):
    """REINFORCE with the mean of the other answers as baseline (arXiv:2402.14740)."""

    kl_in: Literal["loss", "reward"] = "reward"
    advantages: Advantage = "leave_one_out"
    loss: TokenLoss = "reinforce"
    average: Average = "sums"


class ReinforcePP(Policy):
    """REINFORCE++ (arXiv:2501.03262): advantages normalized over the batch. `advantages=group_batch` is its variant with a baseline."""

    kl_in: Literal["loss", "reward"] = "reward"
    advantages: Advantage = "batch"
    average: Average = "tokens"


class ReMax(Policy):
    """REINFORCE with the greedy answer's reward as baseline (arXiv:2310.10505). One answer a prompt is enough."""

    advantages: Advantage = "greedy"
    loss: TokenLoss = "reinforce"
    average: Average = "sums"


class GPG(Policy):
    """Group policy gradient (arXiv:2504.02546): REINFORCE over the mean of the group."""

    advantages: Advantage = "useful"
    loss: TokenLoss = "reinforce"
    average: Average = "tokens"


class OPO(Policy):
    """On-policy RL with the baseline of least variance (arXiv:2505.23585): one update a rollout, no clipping, no KL."""

    advantages: Advantage = "length"
    loss: TokenLoss = "reinforce"
    average: Average = "tokens"


class Rollout(Settings):
    """How answers are sampled, and how they become updates."""

    completions: Annotated[int, Also("num_generations", "group_size", "rollout.n", "n_samples_per_prompt")] = Field(8, gt=0)
    """Answers to each prompt of a rollout: a group. TRL and verl's examples use 8 and 5 to 16. With `objective: gkd` 1 by default."""
    tokens: Annotated[int, Also("max_completion_length", "max_new_tokens", "max_response_length", "max_tokens")] = Field(256, gt=0)
    """The most tokens of an answer, its end-of-sequence token included."""
    top_k: int = Field(0, ge=0)
    """Draws from the k likeliest tokens only; 0 means all. Anything but all makes the sampled distribution another one than the trained
    one, which `objective.correction` then weighs."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Draws from the likeliest tokens whose probabilities first sum to p; 1 means all."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Draws from tokens at least this share as likely as the likeliest; 0 means all."""
    ignore_eos: bool = False
    """Answers go on after the model's own ends, up to the limit: for benchmarks."""
    epochs: Annotated[int, Also("num_iterations", "ppo_epochs", "num_ppo_epochs")] = Field(1, gt=0)
    """Passes over the answers of a rollout before the next one."""
    minibatches: Annotated[
        int,
        Also("num_mini_batches", "steps_per_generation"),
        Also("ppo_mini_batch_size", note="it is how many parts, not the size of one"),
    ] = Field(1, gt=0)
    """Updates of a pass, each with a share of the groups. With one pass and one update, training is exactly on-policy."""
    rows: Annotated[
        int | None,
        Also(
            "per_device_train_batch_size", "ppo_micro_batch_size_per_gpu", "micro_batch_size", "log_prob_micro_batch_size_per_gpu"
        ),
    ] = Field(None, gt=0)
    """Rows of `data.sequence` tokens that are computed at once. Answers are packed into rows, rows into parts of so many; gradients
    of all parts of an update are summed, so this decides memory and speed, not the result. None: at least 4,
    and one for each device that rows are split over."""
    share_prompts: Annotated[bool | None, Also("use_prefix_grouper")] = None
    """Computes a prompt once for those of its answers that stand in one row, in place of once for each (arXiv:2506.05433): the same
    gradients, up to rounding, for fewer tokens; routers of experts count its tokens once. It pays to make `data.sequence` long enough
    for a prompt with all of its answers. None: on CPUs and GPUs, unless the model has recurrent layers or windows shorter than a row.
    On TPUs, and with such windows, no kernel has these masks: all scores of a row are then in memory."""
    resample: Annotated[int, Also("max_num_gen_batches", "dynamic_sampling")] = Field(0, ge=0)
    """Dynamic sampling (DAPO): groups whose rewards are all equal teach nothing, and are replaced by groups of other prompts, in at
    most so many further rounds of generation. 0: off."""
    overlong: Annotated[int, Also("overlong_buffer", "overlong_buffer_len", "soft_punish_cache")] = Field(0, ge=0)
    """Punishes answers within so many tokens of the limit by up to 1 (DAPO's soft punishment). 0: off."""
    keep_cut: Annotated[bool, Also("mask_truncated_completions", note="rollout.keep_cut=false is that")] = True
    """Whether answers that reach the limit without an end are learned from. They are counted either way."""
    slots: int = Field(64, gt=0)
    """Answers that are generated at a time; others wait."""
    devices: Annotated[
        int | None, MayChange(), Also("vllm_tensor_parallel_size", "rollout.tensor_model_parallel_size", "rollout_mesh")
    ] = Field(None, gt=0)
    """Devices that sample and do not train: the last ones of the process, which share the model's heads, features and vocabulary.
    The weights are copied to them for each rollout, and the copies are compared with a checksum. None: all devices do both in
    turns, and nothing is copied."""
    processes: Annotated[
        int | None,
        MayChange(),
        Also("vllm_mode", note="rollout.processes=N is server mode, with processes of its own"),
        Also("vllm_num_engines", "num_rollout_workers"),
    ] = Field(None, gt=0)
    """Processes of this machine that sample and do not train, each on a CPU device of its own, with a copy of the weights; prompts are
    shared out over them. What moved of the weights is sent for each rollout and compared with a checksum. One that ends is started
    again, and its prompts are sampled again. None: this process samples."""
    stuck: Annotated[float | None, MayChange()] = Field(None, gt=0)
    """Seconds after which one of `processes` that has not answered its share of a rollout counts as stuck, and is started again.
    Compiling counts. None: it may take as long as it takes."""
    ahead: Annotated[int, Also("max_staleness", "async_steps", "off_policy_steps", "max_head_offpolicyness")] = Field(0, ge=0, le=4)
    """Rollouts that are sampled ahead, so that `devices` or `processes` sample while the others train. Answers are then of weights
    that have not learned from the last so many rollouts, which `objective.correction` weighs. 0: every rollout is sampled with the
    latest weights."""
    weights: Annotated[Literal["same", "int8"], Also("rollout_quantization", note="rollout.weights=int8")] = "same"
    """Of the engine. same: the trainer's; int8: rounded to 8 bits for each rollout, which halves what a decoding step reads beside
    bfloat16. `objective.correction` weighs the difference, which is logged."""
    workers: Annotated[int | None, MayChange()] = Field(None, gt=0)
    """Processes for reward functions. None: one for each core, at most 8."""

    def rows_over(self, shares: int) -> int:
        """Rows of a part that is split into so many shares."""
        return self.rows or shares * max(1, -(-LEAST_ROWS // shares))

    @property
    def updates(self) -> int:
        """Updates of a rollout."""
        return self.epochs * self.minibatches

    @model_validator(mode="after")
    def _in_order(self) -> "Rollout":
        if broken := [*self._broken()]:
            raise BrokenRules(broken)
        return self

    def _broken(self) -> Iterator[str]:
        """The rules between the settings that do not hold."""
        if self.overlong > self.tokens:
            yield f"overlong = {self.overlong} is above tokens = {self.tokens}"
        if self.processes is not None and self.devices is not None:
            yield "devices are those of this process that sample, and processes sample instead of it: leave one out"
        if self.stuck is not None and self.processes is None:
            yield f"stuck = {self.stuck:g} is for processes that sample: rollout.processes=N"
        if self.ahead and self.devices is None and self.processes is None:
            what = "needs devices that sample while others train: rollout.devices=N, or rollout.processes=N"
            yield f"ahead = {self.ahead} {what}"
