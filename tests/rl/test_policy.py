"""The loss of a policy: packing, parts and order change nothing, and it is what each answer alone gives."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relative
from laws.families import CASES, RUNS, noisy_model, parameters_of

from argosy.core.errors import BadInput, Unsupported
from argosy.data.rows.prompts import Prompt
from argosy.models.parts.attention.attend import Packed
from argosy.models.parts.stack import Unroll
from argosy.rl.algorithms.cispo import CISPO
from argosy.rl.algorithms.dr_grpo import DrGRPO
from argosy.rl.algorithms.grpo import GRPO
from argosy.rl.algorithms.gspo import GSPO
from argosy.rl.algorithms.ppo import PPO
from argosy.rl.algorithms.rloo import RLOO
from argosy.rl.policy.entropy import entropy_of
from argosy.rl.policy.objective import logps_of, shared_of, values_at
from argosy.rl.policy.settings import Correction, Critic
from argosy.rl.rollouts.completions import Trajectory
from argosy.rl.rollouts.packing import (
    PartShape,
    RolloutBatch,
    best_fit_bins,
    pack_trajectories,
    per_token,
    restored_batches,
    rows_by_part,
    stored_batches,
)
from argosy.train.optimizers.sgd import SGD
from argosy.train.schedule import Constant
from argosy.train.state import TrainState, meanings_of, split_trained
from argosy.train.step import make_parts

CASE = CASES["llama-plain"]
LONGEST, KEY = 6, jax.random.key(0)
KINDS = {
    "grpo": GRPO(temperature=0.7, kl=0.1, correction=Correction(highest=1.05)),
    "dr_grpo": DrGRPO(entropy=0.1), "gspo": GSPO(low=0.1, high=0.1), "cispo": CISPO(dual=None, high=1.1),
    "rloo": RLOO(temperature=1.3), "grpo-tokens": GRPO(average="tokens", dual=1.5),
}  # fmt: skip


def answers(count: int = 7) -> list[Trajectory]:
    rng = np.random.default_rng(3)
    result = []
    for i in range(count):
        prompt, completion = (
            rng.integers(3, CASE.vocab, 2 + i % 3).tolist(),
            rng.integers(3, CASE.vocab, 1 + (5 * i) % LONGEST).tolist(),
        )
        # The third answer has tokens of an environment in its middle.
        live = [not (i == 2 and at in (1, 2)) for at in range(len(completion))]
        result.append(
            Trajectory(Prompt(str(i), prompt, {}, ""), completion, live, (-rng.random(len(completion)) * 4).tolist(), True, "")
        )
    return result


def columns(of: list[Trajectory]) -> dict[str, np.ndarray]:
    """Numbers of every token; garbage where there is none."""
    rng = np.random.default_rng(5)
    live = per_token(of, LONGEST, "live")
    filled = {name: rng.normal(0, 1, live.shape).astype(np.float32) for name in ("advantages", "values", "returns")}
    filled |= {name: (-rng.random(live.shape) * 6).astype(np.float32) for name in ("old", "reference")}
    filled["advantages"] *= live
    filled |= {"live": live, "sampler": per_token(of, LONGEST, "logprobs")}
    garbage = {"old": np.nan, "reference": np.nan, "sampler": np.inf, "values": np.nan, "returns": np.nan}
    return {name: np.where(live > 0, a, garbage.get(name, 0.0)).astype(np.float32) for name, a in filled.items()}


def groups() -> list[Trajectory]:
    """The answers of `answers` as groups of 4, 2 and 1 with one prompt each, of 5 tokens, 1 token and 3."""
    rng = np.random.default_rng(4)
    prompts = [Prompt(str(n), rng.integers(3, CASE.vocab, n).tolist(), {}, "") for n in (5, 1, 3)]
    return [replace(trajectory, prompt=prompts[whose]) for trajectory, whose in zip(answers(), (0, 0, 0, 0, 1, 1, 2), strict=True)]


def update_by_parts(objective, shape: PartShape, order: list[int] | None = None, model=None, of: list[Trajectory] | None = None):
    """Gradients and metrics of an update over these answers, in parts of this shape."""
    of = of or answers()
    inputs = columns(of)
    parts = [part.filled(inputs) for part in pack_trajectories(of, order or list(range(len(of))), shape)]
    model = model or noisy_model(CASE, Unroll())
    graph, params, rest = split_trained(model)
    rate = Constant(warmup=0).build(10)
    optimizer = SGD(learning_rate=1.0).build(rate, meanings_of(model))
    add, finish = make_parts(graph, objective, optimizer, rate)
    sums = None
    for part in parts:
        arrays = {name: jnp.asarray(part[name]) for name in {**objective.reads(), **shared_of(shape)}}
        sums = jax.jit(add)(params, rest, {}, arrays, KEY) if sums is None else jax.jit(add)(params, rest, {}, arrays, KEY, sums)
    state = TrainState.start(params, rest, optimizer.init(params), 0)
    after, metrics = jax.jit(finish)(state, sums)
    return {a: np.asarray(after.params[a] - params[a]) for a in params}, metrics, len(parts)


@pytest.mark.parametrize("name", [name if name == "grpo" else pytest.param(name, marks=pytest.mark.slow) for name in KINDS])
def test_parts_packing_and_order_change_no_loss_and_no_gradient(name):
    changes, metrics, count = update_by_parts(KINDS[name], PartShape(4, 24, LONGEST))
    again, told_again, more = update_by_parts(KINDS[name], PartShape(1, 12, LONGEST), [3, 6, 1, 0, 5, 2, 4])
    assert (count, more > 2) == (1, True)
    assert float(metrics["targets"]) == float(told_again["targets"]) > 0
    for metric in metrics:
        assert float(told_again[metric]) == pytest.approx(float(metrics[metric]), rel=2e-5, abs=1e-6), metric
    for address, change in changes.items():
        assert relative(again[address], change) < 2e-4, address


@pytest.mark.parametrize(
    ("row", "run"),
    [(40, "unroll"), *(pytest.param(*arguments, marks=pytest.mark.slow) for arguments in ((17, "unroll"), (40, "scan")))],
)
def test_answers_that_share_their_prompt_teach_what_they_do_alone(row, run):
    """In rows that hold several groups, and in some that split one."""
    of, model = groups(), noisy_model(CASE, RUNS[run])
    alone, metrics, _ = update_by_parts(KINDS["grpo"], PartShape(4, 24, LONGEST), model=model, of=of)
    order = [3, 6, 1, 0, 5, 2, 4]
    changes, told_again, _ = update_by_parts(KINDS["grpo"], PartShape(2, row, LONGEST, shared=True), order, model, of)
    for metric in metrics:
        assert float(told_again[metric]) == pytest.approx(float(metrics[metric]), rel=2e-5, abs=1e-6), metric
    for address, change in alone.items():
        assert relative(changes[address], change) < 2e-4, address


def test_a_prompt_stands_once_before_its_answers():
    of = groups()
    (part,) = pack_trajectories(of, range(len(of)), PartShape(1, 64, LONGEST, shared=True))
    rows, lengths = part.rows, [len(answer.tokens) for answer in of]
    # The group of 4: 4 tokens of the prompt, its last one before each answer. That of 2 has a prompt of one token.
    assert np.sum(rows["segments"] > 0) == 4 + 4 + 2 + 3 + sum(lengths)
    assert np.sum(rows["prefixes"] > 0) == 4 + sum(lengths[:4])
    for slot, owner in enumerate(part.owners[part.owners >= 0].tolist()):
        answer, places = of[owner], rows["places"][slot, : lengths[owner]]
        prompt = answer.prompt.tokens
        assert rows["targets"].reshape(-1)[places].tolist() == answer.tokens
        assert rows["positions"].reshape(-1)[places].tolist() == list(range(len(prompt) - 1, len(prompt) - 1 + len(answer.tokens)))
        # What a token of the answer sees, by segment and prefix, is the prompt and the answer up to there.
        segment, prefix = (rows[name].reshape(-1)[places[-1]] for name in ("segments", "prefixes"))
        seen = np.flatnonzero(np.isin(rows["segments"][0], [segment] + [prefix] * bool(prefix)))
        seen = seen[seen <= places[-1]]
        assert rows["tokens"][0, seen].tolist() == [*prompt, *answer.tokens[:-1]]
        assert rows["tokens"].reshape(-1)[rows["ends"][slot]] == answer.tokens[-1]


def test_a_group_that_is_longer_than_a_row_is_split_and_no_answer_is_lost():
    of = groups()
    parts = pack_trajectories(of, range(len(of)), PartShape(1, 11, LONGEST, shared=True))
    owners = [owner for part in parts for owner in part.owners.tolist() if owner >= 0]
    assert sorted(owners) == list(range(len(of)))
    with pytest.raises(BadInput, match="11 tokens"):
        pack_trajectories(of, range(len(of)), PartShape(1, 10, LONGEST, shared=True))


@pytest.mark.parametrize(("row", "groups", "size"), [(512, 16, 3), (1024, 32, 4), (2048, 64, 8), (1024, 8, 8)])
def test_sharing_prompts_never_needs_more_parts(row, groups, size):
    """Also where groups fill a little more than half of a row, and where rows hold more answers than a part has places for."""
    rng, parts = np.random.default_rng(1), {True: 0, False: 0}
    for least, most in ((80, 255), (20, 60), (100, 101), (1, 30)):
        of: list[Trajectory] = []
        for i in range(groups):
            prompt = Prompt(str(i), [i] * int(rng.integers(20, 60)), {}, "")
            lengths = rng.integers(least, most, size)
            of += [Trajectory(prompt, [1] * n, [True] * n, [0.0] * n, True, "") for n in lengths.tolist()]
        packed = {shared: pack_trajectories(of, range(len(of)), PartShape(4, row, row // 2, shared=shared)) for shared in (True, False)}
        for shared, parts_of in packed.items():
            owners = [owner for part in parts_of for owner in part.owners.tolist() if owner >= 0]
            assert sorted(owners) == list(range(len(of)))
            parts[shared] += len(parts_of)
        assert len(packed[True]) <= len(packed[False])
    assert parts[True] < parts[False]


PREDICTS = [name for name, config in CASES.items() if config.causal and not config.scored]


@pytest.mark.parametrize("name", parameters_of(PREDICTS, ("gemma", "qwen3_next")))
def test_each_family_sees_a_shared_prompt_as_its_own(name):
    """Log-probabilities in rows that share prompts against those of each answer alone, for every family: windows, chunks, latent and
    sparse attention, positions that scale queries. Recurrent layers refuse."""
    config = CASES[name]
    rng = np.random.default_rng(8)
    prompt = Prompt("", rng.integers(3, config.vocab, 9).tolist(), {}, "")
    completions = [rng.integers(3, config.vocab, n).tolist() for n in (6, 3, 5)]
    of = [Trajectory(prompt, completion, [True] * len(completion), [0.0] * len(completion), True, "") for completion in completions]
    model, policy = noisy_model(config, Unroll()), GRPO()
    logps = {}
    for shared, row in ((True, 27), (False, 17)):
        (part,) = pack_trajectories(of, range(len(of)), PartShape(3, row, LONGEST, shared=shared))
        batch = {name: jnp.asarray(a) for name, a in part.rows.items()}
        if shared and config.recurrent:
            with pytest.raises(Unsupported, match="recurrent"):
                logps_of(policy, model, batch)
            return
        assert shared == ("prefixes" in batch)
        logps[shared] = np.zeros((len(of), LONGEST), np.float32)
        part.spread(np.asarray(logps_of(policy, model, batch)[0]), logps[shared])
    live = per_token(of, LONGEST, "live") > 0
    assert relative(logps[True][live], logps[False][live]) < 1e-5


def test_what_recurs_is_known_from_the_settings():
    for name, config in CASES.items():
        if config.causal:
            states = any(spec.row for spec, _ in config.build(Unroll()).layers.holds().values())
            assert config.recurrent == states, name


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("head", [pytest.param("logits", marks=pytest.mark.slow), "blocks", "chunks"])
def test_log_probabilities_are_those_of_each_answer_alone(head, temperature):
    of, model, policy = answers(), noisy_model(CASE, Unroll()), GRPO(temperature=temperature, head=head, chunk=7)
    (part,) = pack_trajectories(of, list(range(len(of))), PartShape(4, 24, LONGEST))
    logps, _, _ = logps_of(policy, model, {name: jnp.asarray(a) for name, a in part.rows.items()})
    out = np.zeros((len(of), LONGEST), np.float32)
    part.spread(np.asarray(logps), out)
    for i, trajectory in enumerate(of):
        ids = jnp.asarray([[*trajectory.prompt.tokens, *trajectory.tokens]])
        logits = model.unembed(model.hidden(ids, Packed(jnp.ones_like(ids)))[0])[0] / temperature
        each = jax.nn.log_softmax(logits)[np.arange(ids.shape[1] - 1), ids[0, 1:]][len(trajectory.prompt.tokens) - 1 :]
        assert relative(out[i, : len(trajectory.tokens)], each) < 1e-5
    assert logps.shape == (PartShape(4, 24, LONGEST).answers, LONGEST)


@pytest.mark.slow
def test_the_entropy_is_that_of_the_whole_distribution():
    """Its value over the tokens of the policy, by hand from the logits; without a bonus there is -log p of the tokens drawn alone."""
    of, model = answers(), noisy_model(CASE, Unroll())
    (part,) = pack_trajectories(of, list(range(len(of))), PartShape(4, 24, LONGEST))
    x, _, _ = model.hidden(jnp.asarray(part.rows["tokens"]), Packed(jnp.asarray(part.rows["segments"])))
    every = values_at(entropy_of(model.unembed(x) / 0.5), jnp.asarray(part.rows["places"]))
    live = part.filled({"live": per_token(of, LONGEST, "live")})["live"]
    expected = float(jnp.sum(every * live) / live.sum())
    metrics = update_by_parts(GRPO(temperature=0.5, entropy=0.1, chunk=5), PartShape(4, 24, LONGEST))[1]
    assert float(metrics["entropy"]) == pytest.approx(expected, rel=1e-5)
    without = update_by_parts(GRPO(temperature=0.5), PartShape(4, 24, LONGEST))[1]
    assert "entropy" not in without
    assert float(without["nll"]) != pytest.approx(expected, rel=1e-2)


@pytest.mark.slow
def test_with_one_update_a_rollout_the_gradient_is_that_of_reinforce():
    """`old` is NaN: the ratio is exactly 1, nothing is clipped, and the importance weights are those of the present policy."""
    of, model = answers(), noisy_model(CASE, Unroll())
    inputs = columns(of) | {"old": np.full((len(of), LONGEST), np.nan, np.float32)}
    (part,) = pack_trajectories(of, list(range(len(of))), PartShape(4, 24, LONGEST))
    batch = {name: jnp.asarray(a) for name, a in part.filled(inputs).items()}
    graph, params, rest = split_trained(model)
    off = Correction(outside="off")

    def gradient(policy):
        from argosy.train.step import model_for

        loss = lambda p: policy({"model": model_for(graph, "float32", p, rest)}, batch, KEY).loss  # noqa: E731
        return jax.grad(lambda p: loss(p).total)(params), loss(params)

    clipped, loss_off = gradient(GRPO(correction=off, average="sums"))
    plain, _ = gradient(RLOO(correction=off))
    for address in params:
        assert relative(clipped[address], plain[address]) < 1e-6, address
    own_loss = -np.sum(inputs["advantages"] * inputs["live"]) / LONGEST
    assert float(loss_off.total) == pytest.approx(own_loss, rel=1e-5)


def with_critic():
    from argosy.models.parts.weight import put, split
    from argosy.rl.policy.critic import attach_critic

    model = noisy_model(CASE, Unroll())
    attach_critic(model, CASE, Unroll())
    rng = np.random.default_rng(9)
    put(model.critic, {a: jnp.asarray(rng.normal(0, 0.3, s.shape), jnp.float32) for a, s in split(model.critic)[1].items()})
    return model


@pytest.mark.slow
def test_a_critic_learns_beside_the_policy_whatever_the_parts():
    objective = PPO(kl=0.0, critic=Critic(clip=None, weight=0.5))
    changes, metrics, _ = update_by_parts(objective, PartShape(4, 24, LONGEST), model=with_critic())
    again, told_again, _ = update_by_parts(objective, PartShape(1, 12, LONGEST), [3, 6, 1, 0, 5, 2, 4], with_critic())
    assert float(metrics["value/error"]) == pytest.approx(float(told_again["value/error"]), rel=1e-5)
    assert any(address.startswith("critic.") for address in changes)
    for address, change in changes.items():
        assert np.abs(change).max() > 0, address
        assert relative(again[address], change) < 2e-4, address


def test_a_part_is_closed_when_its_rows_or_its_places_are_full():
    shape = PartShape(2, 20, 20)
    assert shape.answers == 16
    sizes = np.full(50, 2)
    parts = list(rows_by_part(best_fit_bins(sizes, shape.sequence), shape))
    assert sorted(i for part in parts for row in part for i in row) == list(range(50))
    assert [sum(map(len, part)) for part in parts] == [16, 14, 16, 4], "rows of 10, split where the places are full"
    assert max(len(part) for part in parts) <= 2


def test_experiences_come_back_from_a_checkpoint_and_shared_parts_are_kept_once():
    (part,) = pack_trajectories(answers(), list(range(7)), PartShape(4, 24, LONGEST))
    parts = [part.filled(columns(answers()))]
    batches = [RolloutBatch(parts, {"reward": 0.5}), RolloutBatch(parts, {"reward": 0.5}), RolloutBatch([], {})]
    arrays, described = stored_batches(batches)
    assert {name.partition(".")[0] for name in arrays} == {"0"}
    again = restored_batches(arrays, described)
    assert again[0].parts is again[1].parts
    assert again[2].parts == []
    for name, a in parts[0].items():
        assert np.array_equal(again[0].parts[0][name], a, equal_nan=a.dtype.kind == "f")
