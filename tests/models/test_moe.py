"""Experts against a dense oracle in float64: every expert computes every token, and a mask says who counts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import default, relative
from laws.families import CASES

import argosy
import argosy.infer.load
from argosy.core.formats.safetensors import SafeTensors
from argosy.jobs.convert import convert
from argosy.models.gpt_oss import GptOssConfig
from argosy.models.mixtral import MixtralConfig
from argosy.models.parts.moe import MoE, choose, with_capacity
from argosy.models.parts.stack import Unroll
from argosy.models.parts.stack.addresses import layer_addresses, to_layers
from argosy.models.parts.weight import Moved, fill, merge, put, split, variables
from argosy.models.settings import Experts
from argosy.parallel.mesh import MeshSettings
from argosy.parallel.scope import scope
from argosy.train.objectives.next_token import NextToken
from argosy.train.state import training_graph
from argosy.train.step import model_for

WIDTH = 22
HOWS = {
    "softmax": Experts(count=7, active=3, ffn=10),
    "not normalized": Experts(count=7, active=3, ffn=10, normalized=False, scale=2.5),
    "softmax of the chosen": Experts(count=7, active=3, ffn=10, score="softmax_chosen"),
    "sigmoid, groups of two, bias": Experts(
        count=12, active=4, ffn=10, score="sigmoid", groups=4, kept_groups=2, bias=True, scale=2.5
    ),
    "groups by their best": Experts(count=12, active=2, ffn=10, groups=6, kept_groups=3, group_strength="max"),
    "shared, gated": Experts(count=5, active=2, ffn=10, shared=14, shared_gate=True),
    "sigmoid, on what is read": Experts(
        count=7, active=3, ffn=10, shared=14, score="sigmoid", normalized=False, weigh="input"
    ),
    "one of one": Experts(count=1, active=1, ffn=10),
}


def make_moe(experts: Experts, activation="silu", *, bias=False, seed=0) -> MoE:
    """With noise on every weight, the biases too."""
    moe = MoE({"D": WIDTH}, experts, activation, bias=bias)
    rng = np.random.default_rng(seed)
    put(moe, {name: jnp.asarray(rng.standard_normal(v.shape) * 0.4, jnp.float32) for name, v in variables(moe).items()})
    return with_capacity(moe)


def inputs(B=3, T=17, seed=1):
    rng = np.random.default_rng(seed)
    live = rng.random((B, T)) < 0.8
    return rng.standard_normal((B, T, WIDTH)).astype(np.float32), live


ACTS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "relu": lambda x: np.maximum(x, 0),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def weights_by_hand(experts: Experts, logits: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """[X E]: the weight of each expert for each token, a token at a time, as the papers tell it; 0 where it is not chosen."""
    out = np.zeros_like(logits)
    for row, (z, w) in enumerate(zip(logits, out, strict=True)):
        scores = 1 / (1 + np.exp(-z)) if experts.score == "sigmoid" else softmax(z)
        ranked = (z if experts.score == "softmax_chosen" else scores) + bias
        size = experts.count // experts.groups
        strengths = []
        for g in range(experts.groups):
            best = sorted(ranked[g * size : (g + 1) * size], reverse=True)
            strengths.append(best[0] if experts.group_strength == "max" else sum(best[:2]))
        best_groups = sorted(range(experts.groups), key=lambda g: -strengths[g])[: experts.kept_groups]
        allowed = [e for e in range(experts.count) if e // size in best_groups]
        chosen_experts = sorted(allowed, key=lambda e: -ranked[e])[: experts.active]
        if experts.score == "softmax_chosen":
            w[chosen_experts] = softmax(z[chosen_experts])
        else:
            w[chosen_experts] = scores[chosen_experts] / (scores[chosen_experts].sum() if experts.normalized else 1)
        out[row] *= experts.scale
    return out


def oracle(moe: MoE, x: np.ndarray, live: np.ndarray, drop=lambda weights: weights) -> np.ndarray:
    """What the part should give. drop: takes assignments out of [X E] weights."""
    of = {name: np.asarray(v[...], np.float64) for name, v in variables(moe).items()}
    experts, act, rows = moe.settings, ACTS[moe.activation], x.reshape(-1, WIDTH).astype(np.float64)

    def through(name, rows, eq):
        bias = of.get(f"{name}.b", 0.0)
        return np.einsum(eq, rows, of[f"{name}.w"]) + (bias if np.ndim(bias) == 0 else bias[:, None])

    logits = rows @ of["router.w"] + of.get("router.b", 0.0)
    weights = weights_by_hand(experts, logits, of.get("bias", np.zeros(experts.count)))
    weights = drop(weights * live.reshape(-1, 1))
    read = rows[None] * (weights.T[..., None] if experts.weigh == "input" else np.ones((experts.count, 1, 1)))
    y = act(through("gate", read, "exd,edm->exm")) * through("up", read, "exd,edm->exm")
    counts = weights > 0 if experts.weigh == "input" else weights
    y = np.einsum("xe,exd->xd", counts, through("down", y, "exm,emd->exd"))
    if experts.shared:
        z = (act(rows @ of["shared.gate.w"]) * (rows @ of["shared.up.w"])) @ of["shared.down.w"]
        y += z / (1 + np.exp(-rows @ of["shared_gate.w"])) if experts.shared_gate else z
    return y.reshape(x.shape) * live[..., None]


def run(moe: MoE, x, live):
    graph, leaves = split(moe)
    return jax.jit(lambda leaves, x, live: merge(graph, leaves)(x, live))(leaves, x, live)


@pytest.mark.parametrize("name", default("softmax", "sigmoid, groups of two, bias", "sigmoid, on what is read", of=HOWS))
def test_dropless_equals_every_expert_on_every_token(name):
    moe = make_moe(HOWS[name])
    x, live = inputs()
    y, aux = run(moe, x, live)
    assert relative(y, oracle(moe, x, live)) < 1e-5
    assert int(aux["load"].sum()) == live.sum() * moe.settings.active


@pytest.mark.parametrize("activation", ACTS)
def test_activation_and_biases(activation):
    """Of the experts and of the shared one."""
    moe = make_moe(HOWS["shared, gated"], activation, bias=True)
    x, live = inputs()
    assert relative(run(moe, x, live)[0], oracle(moe, x, live)) < 1e-5


def test_a_capacity_that_nobody_reaches_drops_nothing():
    experts = HOWS["softmax"]
    x, live = inputs()
    moe = make_moe(experts.model_copy(update={"capacity": experts.count / experts.active}))
    y, aux = run(moe, x, live)
    assert relative(y, oracle(moe, x, live)) < 1e-5
    assert (np.asarray(aux["dropped"]) == 0).all()


@pytest.mark.parametrize("rotates", [False, True])
def test_biases_of_split_experts_count_once(rotates):
    """Features over a tensor axis: the parts of the last product are summed, and its bias is not one of them. A rotation of the
    features needs those of all devices."""
    moe = make_moe(HOWS["softmax"], bias=True)
    moe.rotates = rotates
    graph, weights = split(moe)
    x, live = inputs(B=2)

    def run(weights):
        return merge(graph, weights)(jnp.asarray(x), jnp.asarray(live))[0]

    alone = jax.jit(lambda w: run(w))(weights)
    with scope(MeshSettings(data=2, fsdp=1, tensor=2).build(jax.devices()[:4])):
        assert relative(jax.jit(run)(weights), alone) < 1e-5


@pytest.mark.parametrize(
    ("rows", "axes"), [(1, {"fsdp": 4}), pytest.param(3, {"fsdp": 2, "tensor": 2}, marks=pytest.mark.slow)], ids=str
)
def test_rows_that_do_not_divide_over_devices_are_computed_by_all(rows, axes):
    """The engine's one row of tokens, and the last batch of an evaluation."""
    moe = make_moe(HOWS["softmax"])
    graph, weights = split(moe)
    x, live = inputs(B=rows)

    def run(weights):
        return merge(graph, weights)(jnp.asarray(x), jnp.asarray(live))[0]

    alone = jax.jit(lambda w: run(w))(weights)
    with scope(MeshSettings(data=1, **axes).build(jax.devices()[:4])):
        assert relative(jax.jit(run)(weights), alone) < 1e-5


@pytest.mark.parametrize("name", ["softmax", "sigmoid, on what is read"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_capacity_serves_first_choices_first(name, bias):
    experts = HOWS[name].model_copy(update={"capacity": 0.6})
    moe = make_moe(experts, bias=bias)
    x, live = inputs()
    B, T = live.shape
    places = -(-6 * T * experts.active // (10 * experts.count))
    dropped = np.zeros(B, int)

    def drop(weights):
        """Sequence by sequence, a choice at a time, tokens in their order, until an expert is full."""
        out = np.zeros_like(weights)
        ranks = np.argsort(-weights, axis=1)[:, : experts.active]
        for b in range(B):
            used = np.zeros(experts.count, int)
            for choice in range(experts.active):
                for token in range(b * T, (b + 1) * T):
                    e = ranks[token, choice]
                    if weights[token, e] == 0:
                        continue
                    if used[e] < places:
                        out[token, e], used[e] = weights[token, e], used[e] + 1
                    else:
                        dropped[b] += 1
        return out

    expected = oracle(moe, x, live, drop)
    y, aux = run(moe, x, live)
    assert dropped.sum() > 5
    assert relative(y, expected) < 1e-5
    assert relative(aux["dropped"], dropped / (live.sum(1) * experts.active)) < 1e-6
    assert relative(y, oracle(moe, x, live)) > 1e-2, "nothing was dropped"


@pytest.mark.parametrize("weigh", default("output", of=("output", "input")))
@pytest.mark.parametrize("capacity", default(None, of=(None, 0.6)))
def test_tokens_that_are_not_live_reach_no_expert(capacity, weigh):
    """Their contents, NaN too, change nothing of the others; they take no place and are counted nowhere."""
    moe = make_moe(HOWS["softmax"].model_copy(update={"capacity": capacity, "weigh": weigh}))
    x, live = inputs()
    y, aux = run(moe, x, live)
    z, again = run(moe, np.where(live[..., None], x, np.nan).astype(np.float32), live)
    np.testing.assert_array_equal(y[live], z[live])
    for name in aux:
        np.testing.assert_array_equal(aux[name], again[name])
    assert not np.asarray(y)[~live].any()
    graph, leaves = split(moe)
    x, live = jnp.asarray(np.where(live[..., None], x, np.nan), jnp.float32), jnp.asarray(live)
    back = jax.jit(jax.grad(lambda w: jnp.sum(jnp.where(live[..., None], merge(graph, w)(x, live)[0], 0) ** 2)))(leaves)
    assert np.isfinite(back["router.w"]).all()


@pytest.mark.parametrize("over", ["sequence", "batch"])
def test_aux_losses_by_hand(over):
    experts = HOWS["softmax"].model_copy(update={"balance_over": over})
    moe = make_moe(experts)
    x, live = inputs()
    aux = run(moe, x, live)[1]
    router = np.asarray(moe.router.w[...], np.float64)

    def balance(x, live):
        logits = x[live].astype(np.float64) @ router
        f = np.bincount(np.argsort(-logits, 1)[:, : experts.active].ravel(), minlength=experts.count) / len(logits)
        return experts.count * (f * softmax(logits).mean(0)).sum(), (np.log(np.exp(logits).sum(1)) ** 2).mean()

    each = np.asarray([balance(x[b], live[b]) for b in range(len(x))])
    expected = each[:, 0] if over == "sequence" else np.full(len(x), balance(x, live)[0])
    assert relative(aux["balance"], expected) < 1e-5
    assert relative(aux["router_z"], each[:, 1]) < 1e-5


def test_the_bias_moves_choices_and_not_weights():
    experts = HOWS["sigmoid, groups of two, bias"].model_copy(update={"groups": 1, "kept_groups": 1, "normalized": False})
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((1, 50, experts.count)), jnp.float32)
    bias = jnp.zeros(experts.count).at[5].set(10.0)
    weights, chosen_experts = choose(logits, experts, bias)
    assert (chosen_experts[..., 0] == 5).all()
    np.testing.assert_allclose(weights[..., 0], experts.scale * jax.nn.sigmoid(logits[..., 5]), rtol=1e-6)
    assert not (choose(logits, experts)[1] == 5).any(-1).all()


def test_experts_are_distinguished_where_a_sigmoid_is_one():
    """And where a softmax is zero: as the reference implementation of Llama 4 chooses."""
    logits = jnp.asarray([[[18.0, 25.0, 20.0, 30.0, -300.0, -200.0, -250.0]]])
    for score in ("sigmoid", "softmax"):
        experts = Experts(count=7, active=7, ffn=10, score=score, normalized=False)
        assert choose(logits, experts)[1].tolist() == [[[3, 1, 2, 0, 5, 6, 4]]]


@pytest.mark.parametrize("name", ["softmax", "sigmoid, on what is read"])
def test_gradients_reach_router_and_experts_through_a_capacity(name):
    moe = make_moe(HOWS[name].model_copy(update={"capacity": 0.8}))
    graph, leaves = split(moe)
    x, live = map(jnp.asarray, inputs())
    grads = jax.jit(jax.grad(lambda leaves: jnp.sum(merge(graph, leaves)(x, live)[0] ** 2)))(leaves)
    assert all(np.isfinite(g).all() and np.abs(g).max() > 0 for g in grads.values())


@pytest.mark.parametrize("name", default("softmax", of=["softmax", "sigmoid, groups of two, bias", "sigmoid, on what is read"]))
def test_gradients_of_dropless_are_those_of_every_expert(name):
    """Of the weights, of what comes in, and through the choice's weights of the router."""
    moe = make_moe(HOWS[name])
    graph, leaves = split(moe)
    x, live = map(jnp.asarray, inputs())

    def dense(leaves, x):
        """Every expert on every token, then a sum in which those not chosen have weight 0."""
        model, rows, settings_of = merge(graph, leaves), x.reshape(-1, WIDTH), moe.settings
        bias = None if model.bias is None else model.bias[...]
        weights, chosen_experts = (a[0] for a in choose((rows @ model.router.w[...])[None], settings_of, bias))
        each = jnp.zeros((len(rows), settings_of.count)).at[jnp.arange(len(rows))[:, None], chosen_experts].set(weights)
        each = each * live.reshape(-1, 1).astype(each.dtype)
        inside = each if settings_of.weigh == "input" else jnp.ones_like(each)
        y = jnp.einsum("xe,xd->exd", inside, rows)
        y = jax.nn.silu(jnp.einsum("exd,edm->exm", y, model.gate.w[...])) * jnp.einsum("exd,edm->exm", y, model.up.w[...])
        y = jnp.einsum("exm,emd->exd", y, model.down.w[...])
        y = jnp.einsum("xe,exd->xd", jnp.sign(each) if settings_of.weigh == "input" else each, y).reshape(x.shape)
        return y if model.shared is None else y + model.shared(x * live[..., None].astype(x.dtype))

    def slope(run):
        return jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(run(*a))), (0, 1)))(leaves, x)

    (ours, dx), (theirs, dense_dx) = slope(lambda w, x: merge(graph, w)(x, live)[0]), slope(dense)
    assert relative(dx, dense_dx) < 1e-5
    for address, expected in theirs.items():
        if np.abs(expected).max():  # the bias has none
            assert relative(ours[address], expected) < 1e-5, address
    assert np.abs(theirs["router.w"]).max() > 1e-3


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        (MixtralConfig, {"shared": 26}, "moe.shared"),
        (MixtralConfig, {"bias": True}, "moe.bias"),
        (MixtralConfig, {"shared": 26, "shared_gate": True}, "moe.shared, moe.shared_gate"),
        (MixtralConfig, {"shared_gate": True}, "there is no shared expert"),
        (MixtralConfig, {"ffn": 30}, "ffn = 20, moe.ffn = 30"),
        (GptOssConfig, {"bias": True, "score": "softmax_chosen"}, "moe.bias"),
    ],
)
def test_what_a_family_has_no_names_for_is_refused(family, changes, says):
    sizes = {"vocab": 101, "width": 24, "layers": 2, "ffn": 20, "heads": 2, "context": 64}
    with pytest.raises(ValueError, match=says):
        family(**sizes, moe=Experts(**{"count": 4, "active": 2, "ffn": 20} | changes))


def test_gpt_oss_has_an_activation_of_its_own():
    sizes = {"vocab": 101, "width": 24, "layers": 2, "ffn": 20, "heads": 2, "context": 64}
    with pytest.raises(ValueError, match="fixed activation"):
        GptOssConfig(**sizes, moe=Experts(count=4, active=2, ffn=20, score="softmax_chosen"), activation="relu")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek-3", "deepseek-3.2"])
def test_the_bias_of_a_choice_stays_float32(name, tmp_path):
    """Rounded to bfloat16, a bias of eight with small differences would choose other experts."""
    model = CASES[name].build(Unroll())
    fill(model, jax.random.key(0), addresses=layer_addresses(model))
    draw = np.random.default_rng(0).standard_normal
    biases = {a: jnp.asarray(8 + 0.05 * draw(v.shape), jnp.float32) for a, v in variables(model).items() if isinstance(v, Moved)}
    put(model, biases)
    argosy.LM(CASES[name], model).save(tmp_path / "float32", format="hub")
    convert(str(tmp_path / "float32"), tmp_path / "hub", "hub", "bfloat16")
    convert(str(tmp_path / "float32"), tmp_path / "argosy", "argosy", "bfloat16")
    lm = argosy.load(tmp_path / "hub")
    lm.save(tmp_path / "again", format="hub")
    for source in ("hub", "argosy", "again"):
        lm = argosy.load(tmp_path / source, dtype="bfloat16")
        stored = to_layers(lm.module, split(lm.module)[1])
        assert {str(w.dtype) for a, w in stored.items() if a not in biases} == {"bfloat16"}
        for address, bias in biases.items():
            np.testing.assert_array_equal(stored[address], bias)
    file = SafeTensors.open(tmp_path / "again" / "model.safetensors")
    kinds = {str(file.dtype(n)) for n in file.names if not n.endswith("e_score_correction_bias")}
    assert kinds == {"bfloat16"}
    random_lm = argosy.infer.load.random_lm(CASES[name], 0, dtype="bfloat16")
    assert {str(v.dtype) for v in variables(random_lm.module).values() if isinstance(v, Moved)} == {"float32"}


TINY = MixtralConfig(
    vocab=101, width=24, layers=2, ffn=20, heads=2, context=64, moe=Experts(count=4, active=2, ffn=20, capacity=0.5)
)


@pytest.mark.slow
def test_training_tells_what_is_dropped_and_nothing_else_drops(tmp_path):
    model = TINY.build(Unroll())
    fill(model, jax.random.key(0), addresses=layer_addresses(model))
    tokens = np.random.default_rng(0).integers(3, TINY.vocab, (2, 24))
    batch = {"tokens": tokens, "targets": tokens, "segments": np.ones_like(tokens), "mask": np.ones(tokens.shape, np.float32)}
    batch, objective = jax.tree.map(jnp.asarray, batch), NextToken(head="logits")
    graph, weights = split(model)

    limited = training_graph(model)

    @partial(jax.jit, static_argnames="training")
    def loss(weights, training):
        model = model_for(limited if training else graph, "float32", weights)
        return objective({"model": model}, batch, jax.random.key(0))

    results = [loss(weights, training) for training in (True, False)]
    dropped = results[0].metrics["experts_dropped"]
    assert float(dropped.total / dropped.weight) > 0.2
    assert float(results[0].loss.value()) != float(results[1].loss.value())
    assert "experts_dropped" not in results[1].metrics
    argosy.LM(TINY, model).save(tmp_path / "kept", format="argosy")
    lm = argosy.load(tmp_path / "kept")
    assert lm.config.moe.capacity == 0.5
    alone = [lm.logits(tokens[i : i + 1]) for i in range(2)]
    assert relative(lm.logits(tokens), np.concatenate(alone)) < 1e-5
    assert relative(argosy.LM(TINY, model).logits(tokens), np.concatenate(alone)) < 1e-5
