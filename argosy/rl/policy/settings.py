"""The settings that all algorithms share (`rl.algorithms`), without jax. A policy's settings are also its objective
(`rl.policy.objective`).
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from argosy.core.errors import nearest
from argosy.core.registry import Registry, is_file
from argosy.core.settings import Also, BrokenRules, Settings
from argosy.rl.algorithms import ADVANTAGES, ALIASES, LOSSES
from argosy.rl.policy.calls import parameter_names
from argosy.train.beside import CRITIC
from argosy.train.objectives.objective import Needs, TokenObjective


def _registered(registry: Registry, aliases: dict[str, str]) -> AfterValidator:
    def check(value: str) -> str:
        if value not in registry and value not in aliases and not is_file(value):
            raise ValueError(f"there is no {registry.noun} `{value}`: {nearest(value, [*registry, *aliases])}")
        return value

    return AfterValidator(check)


AdvantageName = Annotated[str, _registered(ADVANTAGES, ALIASES)]
LossName = Annotated[str, _registered(LOSSES, {})]
Average = Literal["tokens", "answers", "sums"]
Scale = Literal["group", "batch", "none"]


class Correction(Settings):
    """Importance weights for the difference between the engine's log-probabilities and the trainer's (`rl.policy.correction`)."""

    outside: Literal["truncate", "mask", "off"] = "truncate"
    """What happens to weights out of bounds. truncate: they are moved to the bound (TIS); mask: their tokens are left out of the loss
    (IcePop, arXiv:2510.18855); off: no weights. The differences are logged either way."""
    level: Annotated[Literal["token", "sequence"], Also("vllm_importance_sampling_mode")] = "token"
    """One weight per token, or one per completion: the product over its tokens."""
    lowest: float = Field(0.0, ge=0, le=1)
    """Lower bound of a weight."""
    highest: Annotated[float, Also("vllm_importance_sampling_cap")] = Field(2.0, ge=1)
    """Upper bound of a weight; 2 as in verl."""


class Credit(Settings):
    """Which turns of a completion a reward is credited to, if an environment rewards turns (`rl.advantages.turns`)."""

    by: Literal["answer", "to_go", "mixed"] = "answer"
    """answer: the rewards of all turns are added, and the sum is credited to every token of the completion. to_go: a turn is credited
    with its own and all later rewards, compared with the same turn of the prompt's other completions; with a critic, rewards are placed
    at the last token of their turn. mixed: every turn is credited with the outcome, which is the reward of the last turn plus those of
    reward functions; each earlier turn is also credited with its own reward (MT-GRPO, arXiv:2505.11821).
    """
    gamma: float = Field(1.0, gt=0, le=1)
    """For `to_go`: discount of a reward per turn of distance. Below 1, late rewards count less for early turns."""
    weight: Annotated[float, Also("turn_advantage_coef", "step_advantage_w")] = Field(1.0, gt=0)
    """For `mixed`: weight of a turn's own advantage relative to that of the outcome."""

    @model_validator(mode="after")
    def _apply(self) -> "Credit":
        for name, by in (("gamma", "to_go"), ("weight", "mixed")):
            if self.by != by and getattr(self, name) != 1:
                raise ValueError(f"{name} = {getattr(self, name):g} does not apply: it is for by={by}, not {self.by}")
        return self


class Critic(Settings):
    """A second model that learns the expected reward at each token: a copy of the initial policy with a head of one score."""

    gamma: float = Field(1.0, gt=0, le=1)
    """Discount of a reward per token of distance. With 1, a reward at the end is worth as much to a long completion as to a short one.
    """
    lam: Annotated[float, Also("gae_lambda")] = Field(0.95, ge=0, le=1)
    """For generalized advantage estimation (arXiv:1506.02438): 1 trusts the rewards, 0 the critic. 0.95 as in PPO's paper and TRL."""
    weight: Annotated[float, Also("vf_coef", "value_loss_coef")] = Field(0.1, gt=0)
    """Weight of the critic's loss. With Adam it decides only the share of the gradient's norm that clipping sees; 0.1 as in TRL."""
    rate: float = Field(10.0, gt=0)
    """The critic's learning rate as a multiple of the policy's; verl's examples use 1e-5 and 1e-6."""
    clip: Annotated[float | None, Also("cliprange_value", "value_clip")] = Field(0.2, gt=0)
    """How far a value may move from its value before the update, in units of the return (arXiv:1707.06347). None: no clipping."""


class Policy(TokenObjective):
    """A policy that learns from rewards of its own completions."""

    temperature: float = Field(1.0, gt=0)
    """Divides the logits, both in sampling and in the trained log-probabilities, so the trained policy is the sampled distribution.
    Below 1, completions vary less.
    """
    advantages: Annotated[AdvantageName, Also("advantage_estimator", "adv_estimator")] = "grpo"
    """The baseline that a reward is compared with (`rl.algorithms`). grpo, or group: the mean of its group, see `scale`; rloo, or
    leave_one_out: the mean of the others of its group; reinforce_pp, or batch: the mean of all completions of the rollout;
    reinforce_pp_baseline, or group_batch: the mean of its group, then divided by the standard deviation of the batch; remax, or greedy:
    the reward of the prompt's greedy completion; gpg, or useful: the mean of its group, scaled by the number of groups over the number
    of groups whose rewards differ; opo, or length: the mean of its group, weighted by length; or FILE.py:FUNCTION.
    """
    scale: Annotated[Scale, Also("scale_rewards", "norm_adv_by_std_in_grpo")] = "group"
    """The divisor of `advantages: grpo`: the standard deviation of the group's rewards, of all rewards of the rollout, or none."""
    normalize: Annotated[Literal["sum", "each"], Also("multi_objective_aggregation")] = "sum"
    """For several rewards: sum adds them by weight, then compares; each compares every reward with its group first, then adds
    (GDPO, arXiv:2601.05242), so that a reward of small range counts too. `each` is for `advantages: grpo` only."""
    loss: Annotated[LossName, Also("importance_sampling_level")] = "ppo"
    """The loss of a token (`rl.algorithms`). ppo: clipped ratio; gspo: clipped ratio of the whole completion, which moves less (`low`
    3e-4, `high` 4e-4); cispo: REINFORCE with bounded weights (`low` 0, `high` 5); reinforce: no ratio, for one update per rollout; or
    FILE.py:FUNCTION.
    """
    low: Annotated[float, Also("epsilon", "clip_ratio", "clip_ratio_low")] = Field(0.2, ge=0)
    """Lower clip: below a ratio of 1 - low, the ratio has no gradient. For `cispo`, the lower bound of the weight itself."""
    high: Annotated[float, Also("epsilon_high", "clip_ratio_high")] = Field(0.2, ge=0)
    """Upper clip: above a ratio of 1 + high, the ratio has no gradient. For `cispo`, the upper bound of the weight itself."""
    dual: Annotated[float | None, Also("delta", "clip_ratio_c")] = Field(None, gt=1)
    """Bound of the loss of tokens with negative advantage whose ratio has exploded (dual-clip PPO, arXiv:1912.09729, uses 3). None:
    off, as in the papers of PPO, GRPO and DAPO.
    """
    average: Annotated[Average, Also("loss_agg_mode", "loss_type")] = "answers"
    """How token losses are averaged. answers: every completion weighs the same; tokens: every token weighs the same; sums: the sum over
    the tokens of a completion divided by the constant `rollout.tokens`, then the mean over completions.
    """
    kl: Annotated[float, Also("beta", "kl_coef", "kl_loss_coef")] = Field(0.0, ge=0)
    """Weight of the KL divergence from the initial policy. 0: no penalty, and no reference is computed, as in TRL and in DAPO's paper;
    GRPO's paper uses 0.04.
    """
    kl_estimator: Annotated[Literal["k1", "k2", "k3", "k3+"], Also("kl_loss_type", "kl_penalty")] = "k3+"
    """How the divergence is estimated (`rl.policy.kl`). k3+: k3's value with the right gradient. As a loss k1 has no gradient on
    average."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the penalty is applied. loss: added to each token's loss, with its own gradient; reward: subtracted from the reward (PPO,
    RLOO, REINFORCE++), estimated by k1, which is right there.
    """
    entropy: Annotated[float, Also("entropy_coef", "entropy_coeff")] = Field(0.0, ge=0)
    """Weight of the entropy bonus. Above 0, the whole distribution of every token is computed a second time."""
    correction: Correction = Correction()
    """Importance weights for the difference between the engine's and the trainer's log-probabilities."""
    credit: Credit = Credit()
    """For completions of several turns: which turns a reward is credited to."""

    critic: Critic | None = None
    """The critic. None: advantages compare rewards with each other."""

    needs: ClassVar[Needs] = Needs(formats=("prompt",), rollouts="rewards")

    @model_validator(mode="after")
    def _parts_fit(self) -> "Policy":
        if broken := [*self._broken(), *self._broken_by_credit(), *self._idle()]:
            raise BrokenRules(broken)
        return self

    def _broken(self) -> Iterator[str]:
        """Yields a sentence for each rule between these settings that does not hold."""
        if self.normalize == "each" and self.comparison != "grpo":
            yield f"normalize=each is for advantages=grpo, not {self.advantages}"
        if self.scale != "group" and self.comparison != "grpo" and not is_file(self.comparison):
            yield f"scale={self.scale} is for advantages=grpo, not {self.advantages}"
        if self.kl and self.kl_in == "loss" and self.kl_estimator == "k1":
            yield "kl_estimator=k1 has no gradient on average, so it penalizes nothing: k3+ or k2 do"
        if self.loss == "cispo" and not self.low <= 1 <= self.high:
            yield f"low = {self.low:g}, high = {self.high:g}: with loss=cispo they bound the ratio itself, such as 0 and 5"
        if self.loss in ("ppo", "gspo") and self.low > 1:
            yield f"low = {self.low:g} is above 1: ratios are clipped at 1 - low"
        if self.dual is not None and self.loss != "ppo":
            yield f"dual is for loss=ppo, not {self.loss}"

    def _broken_by_credit(self) -> Iterator[str]:
        """Yields a sentence for each reason why turns cannot be credited one by one under these settings."""
        by = self.credit.by
        if by == "answer":
            return
        if self.critic is not None:
            if by == "mixed":
                yield "credit.by=mixed compares answers with each other, not with a critic: credit.by=to_go does"
            if self.credit.gamma != 1:
                yield f"credit.gamma = {self.credit.gamma:g} does not apply: with a critic it is critic.gamma, of tokens"
        elif self.comparison != "grpo":
            problem = f"credit.by={by} is for objectives that compare within groups (grpo, dr_grpo, dapo, gspo, cispo) and for ppo"
            yield f"{problem}: {self.advantages} needs one reward an answer"
        if self.normalize == "each":
            yield f"normalize=each compares one number an answer of every reward: it is for credit.by=answer, not {by}"

    def _idle(self) -> Iterator[str]:
        """Yields a sentence for each setting that was changed from its default but has no effect."""
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
                if (self.comparison if name == "advantages" else value) != type(self).model_fields[name].default:
                    yield f"{name} = {value} does not apply: {why}"

    @property
    def comparison(self) -> str:
        """The canonical name of the setting `advantages`, whichever alias was written."""
        return ALIASES.get(self.advantages, self.advantages)

    @property
    def needs_greedy(self) -> bool:
        """Whether rewards are compared with the rewards of greedy completions, which must then be sampled."""
        return self.critic is None and "greedy" in parameter_names(ADVANTAGES[self.comparison])

    @property
    def compares_groups(self) -> bool:
        """Whether rewards are compared within their group, so that groups of equal rewards teach nothing."""
        return self.critic is None and not parameter_names(ADVANTAGES[self.comparison]) & {"greedy", "mask"}

    @property
    def roles(self) -> Mapping[str, str]:
        return {"reference": "rollout"} if self.kl else {}

    @property
    def trained_parts(self) -> frozenset[str]:
        return frozenset() if self.critic is None else frozenset([CRITIC])

    def reads(self) -> Any:
        from argosy.rl.policy.objective import fields_of

        return fields_of(self)

    def __call__(self, models: Any, batch: Any, key: Any) -> Any:
        """Computes the loss of a batch, a `train.objectives.loss.Loss`."""
        from argosy.rl.policy.objective import policy_loss

        return policy_loss(self, models, batch)
