"""DeepSeek beyond the laws: the two forms of latent attention, the index, the module that predicts further ahead, what
config.json says."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_weights import write_model
from helpers import LOGIT_ROUNDING, relative
from laws.families import CASES, forward, noisy_model, tokens_of
from safetensors.numpy import save_file
from train.test_next_token import batch_of

import argosy
from argosy.adapt.lora import LoRA
from argosy.adapt.surgery import freeze, swap, thaw
from argosy.core.errors import BadInput, Unsupported
from argosy.core.settings import dump
from argosy.jobs.convert import convert
from argosy.models.deepseek import DeepSeekConfig
from argosy.models.parts.attention import indexer
from argosy.models.parts.attention.attend import Contiguous, Packed, Paged
from argosy.models.parts.attention.cache import contiguous, empty_pools
from argosy.models.parts.attention.indexer import top_k_mask
from argosy.models.parts.attention.latent import Latent
from argosy.models.parts.stack import Scan, Unroll
from argosy.models.parts.weight import merge, split
from argosy.models.settings import Experts, Index, Reach, Rope
from argosy.ops.attention import See
from argosy.run.settings.recipe_files import preset_config
from argosy.train.objectives.next_token import NextToken
from argosy.train.optimizers.adam import AdamW
from argosy.train.schedule import Constant
from argosy.train.state import TrainState, meanings_of, split_trained
from argosy.train.step import make_step
from argosy.weights.peft.reader import read_adapter
from argosy.weights.peft.sites import sites

GOLDENS = Path(__file__).parents[1] / "goldens" / "models"
FORMS = (True, False, None)


def config_json(name: str) -> dict:
    return json.loads((GOLDENS / name / "config.json").read_text(encoding="utf-8"))


# ---------------------------------------------------------------- absorbed and expanded


@pytest.fixture(
    scope="module", params=["deepseek-2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("deepseek-3", "deepseek-3.2"))]
)
def latent(request):
    config = CASES[request.param]
    model, tokens = noisy_model(config, Unroll()), tokens_of(config)
    step = forward(model)
    expanded = step(tokens, Packed(jnp.ones_like(tokens), absorb=False))[0]
    return model, step, tokens, np.asarray(expanded)


@pytest.mark.slow
@pytest.mark.parametrize("absorb", FORMS)
def test_packed_forms_are_equal(latent, absorb):
    _, step, tokens, expected = latent
    assert relative(step(tokens, Packed(jnp.ones_like(tokens), absorb))[0], expected) < LOGIT_ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("absorb", FORMS)
def test_contiguous_forms_are_equal(latent, absorb):
    model, step, tokens, expected = latent
    cache, outs = contiguous(model.layers.holds(), *tokens.shape), []
    for low, high in [(0, 30), (30, 31), (31, 41)]:
        at = jnp.broadcast_to(jnp.arange(low, high, dtype=jnp.int32), (2, high - low))
        attend = Contiguous(at, jnp.ones_like(at, bool), absorb, fresh=low == 0)
        logits, cache, _ = step(tokens[:, low:high], attend, cache)
        outs.append(logits)
    assert relative(jnp.concatenate(outs, 1), expected) < LOGIT_ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("absorb", [True, False, None])
def test_paged_forms_are_equal(latent, absorb):
    model, step, tokens, expected = latent
    cache, outs = empty_pools(model.layers.holds(), 2, 24, 4), []
    table = jnp.asarray(np.random.default_rng(0).permutation(24)[:22].reshape(2, 11), jnp.int32)
    for low, high in [(0, 30), (30, 31), (31, 41)]:
        t = jnp.broadcast_to(jnp.arange(high - low, dtype=jnp.int32), (2, high - low))
        spans = jnp.full(2, low, jnp.int32), jnp.full(2, high - low, jnp.int32)
        logits, cache, _ = step(tokens[:, low:high], Paged(table, jnp.arange(2, dtype=jnp.int32), *spans, t, absorb), cache)
        outs.append(logits)
    assert relative(jnp.concatenate(outs, 1), expected) < LOGIT_ROUNDING


def test_only_latents_and_rope_are_kept(latent):
    """R + P numbers a token and layer, whatever the number of heads; a key of the index beside."""
    model, config = latent[0], latent[0].config
    specs = (("latent", (config.latent_rank + config.rope_size,)),)
    specs += (("index", (config.index.size,)),) if config.index else ()
    assert {spec.token for spec, _ in model.layers.holds().values()} == {specs}


def test_decoding_absorbs_and_training_expands():
    """At the sizes of DeepSeek-V3, counted by hand: a token against 4,096 costs 153 million multiplications, not 68 billion."""
    sizes = {"head_size": 128, "rope_size": 64, "value_size": 128, "latent_rank": 512}
    moe = Experts(count=2, active=1, ffn=8, score="sigmoid", bias=True)
    config = DeepSeekConfig(vocab=9, width=16, layers=2, context=9, ffn=8, heads=128, moe=moe, **sizes)
    layer = getattr(config.build().layers, "0").attn
    expanded, absorbed = Latent(layer).multiplications(1, 4096)
    assert absorbed == 128 * 512 * 256 + 4096 * 128 * (512 + 64 + 512)
    assert expanded == 4096 * 128 * 512 * 256 + 4096 * 128 * (128 + 64 + 128)
    assert absorbed < expanded
    expanded, absorbed = Latent(layer).multiplications(4096, 4096)
    assert expanded < absorbed


# ---------------------------------------------------------------- the index


def picked_by_hand(indexer, x, latent, segments, topk: int, base: float) -> np.ndarray:
    """[B T S], a score at a time, in float64."""
    w = {name: np.asarray(a, np.float64) for name, a in split(indexer)[1].items()}
    x, latent, segments = np.asarray(x, np.float64), np.asarray(latent, np.float64), np.asarray(segments)
    half = indexer.turns // 2

    def at(y, t: int):
        """Features i and i + P/2 as a complex number, turned by t."""
        turn = np.exp(1j * t * base ** -(np.arange(half) / half))
        z = (y[..., :half] + 1j * y[..., half : 2 * half]) * turn
        return np.concatenate([z.real, z.imag, y[..., 2 * half :]], -1)

    out = np.zeros((*segments.shape, segments.shape[1]), bool)
    for b, row in enumerate(segments):
        starts = [t - list(row).index(row[t]) for t in range(len(row))]
        k = x[b] @ w["k.w"]
        k = (k - k.mean(-1, keepdims=True)) / np.sqrt(k.var(-1, keepdims=True) + 1e-6)
        k = k * w["k_norm.scale"] + w["k_norm.b"]
        keys = [at(k[s], starts[s]) for s in range(len(row))]
        for t in range(len(row)):
            q = at(np.einsum("q,qij->ij", latent[b, t], w["q.w"]), starts[t])
            seen = [s for s in range(t + 1) if row[s] == row[t]]
            scores = np.asarray([np.maximum(q @ keys[s], 0) @ (x[b, t] @ w["weigh.w"]) for s in seen])
            best = np.argsort(-scores, kind="stable")
            if len(seen) > topk:
                assert scores[best[topk - 1]] - scores[best[topk]] > 1e-5 * np.abs(scores).max(), "too close to call"
            out[b, t, [seen[i] for i in best[:topk]]] = True
    return out


def test_what_is_picked_equals_brute_force():
    """Within its own segment, never ahead, and everything where less is seen than may be picked."""
    model, draw = noisy_model(CASES["deepseek-3.2"], Unroll()), np.random.default_rng(5)
    indexer = getattr(model.layers, "1").attn.index
    x, latent = (jnp.asarray(draw.standard_normal((2, 41, n)), jnp.float32) for n in (44, 15))
    segments = jnp.asarray([[1] * 6 + [2] * 35, [3] * 22 + [4] * 19], jnp.int32)
    packed = Packed(segments)
    queries, keys = indexer(x, latent, Reach(rope=Rope(base=50, pairs="interleaved")), packed)
    t = jnp.broadcast_to(jnp.arange(41, dtype=jnp.int32), segments.shape)
    see = indexer.pick(queries, keys, See(t, t, segments, segments, aligned=True), None)
    expected = picked_by_hand(indexer, x, latent, segments, topk=9, base=50)
    np.testing.assert_array_equal(np.asarray(see.picked), expected)
    np.testing.assert_array_equal(expected.sum(-1), np.minimum(np.asarray(packed.positions) + 1, 9))


def test_of_equals_the_first_are_picked():
    scores = np.random.default_rng(0).integers(-3, 3, (3, 5, 12)).astype(np.float32)
    scores[0] = -np.inf
    expected = np.zeros(scores.shape, bool)
    np.put_along_axis(expected, np.argsort(-scores, -1, kind="stable")[..., :4], True, -1)
    np.testing.assert_array_equal(np.asarray(top_k_mask(jnp.asarray(scores), 4)), expected)


@pytest.mark.slow
def test_an_index_that_picks_everything_changes_nothing():
    config = CASES["deepseek-3.2"]
    tokens = tokens_of(config)
    packed = Packed(jnp.ones_like(tokens))
    plain = forward(noisy_model(config.model_copy(update={"index": None}), Unroll()))(tokens, packed)[0]
    for topk, same in ((41, True), (40, False)):  # of 40, only the last of 41 queries leaves one out
        index = config.index.model_copy(update={"topk": topk})
        got = forward(noisy_model(config.model_copy(update={"index": index}), Unroll()))(tokens, packed)[0]
        assert (got[:, :40] == plain[:, :40]).all() if same else relative(got[:, :40], plain[:, :40]) < LOGIT_ROUNDING
        assert (relative(got[:, 40], plain[:, 40]) < LOGIT_ROUNDING) == same


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v32-plain", "deepseek_v32-groups"])
def test_the_goldens_depend_on_what_is_picked(name: str, tmp_path: Path):
    """test_parity would pass on an index that is never asked, if nothing followed from it."""
    folder = write_model(GOLDENS / name, tmp_path / "model")
    golden = dict(np.load(GOLDENS / name / "golden.npz"))
    (folder / "config.json").write_text(json.dumps(config_json(name) | {"index_topk": 41}))
    assert relative(argosy.load(folder).logits(golden["tokens"]), golden["logits"]) > 1e-2


def is_index(address: str) -> bool:
    return ".attn.index." in address


@pytest.mark.slow
def test_a_step_leaves_the_index_alone():
    """With decay on everything: no gradient would bring back what it takes."""
    model = noisy_model(CASES["deepseek-3.2"], Unroll())
    graph, params, rest = split_trained(model)
    assert not any(map(is_index, params))
    assert sum(map(is_index, rest)) == 5 * 4  # three layers, and that of the module ahead
    rate = Constant(warmup=0).build(10)
    optimizer = AdamW(learning_rate=1e-2, weight_decay=0.5, decay="all").build(rate, meanings_of(model))
    state = TrainState.start(params, rest, optimizer.init(params), 0)
    after, _ = jax.jit(make_step(graph, NextToken(), optimizer, rate))(state, batch_of())
    assert all((np.asarray(after.rest[a]) == np.asarray(rest[a])).all() for a in rest if is_index(a))
    assert all((np.asarray(after.params[a]) != np.asarray(params[a])).any() for a in params)


@pytest.mark.slow
def test_no_gradient_goes_through_the_choice():
    """Nor to what the index reads: the whole model differentiated, its frozen weights too."""
    config = CASES["deepseek-3.2"]
    graph, weights = split(noisy_model(config, Unroll()))
    tokens = tokens_of(config)

    def loss(weights):
        return jnp.sum(merge(graph, weights)(tokens, Packed(jnp.ones_like(tokens)))[0] ** 2)

    grads = jax.jit(jax.grad(loss))(weights)
    assert {a for a, g in grads.items() if a.startswith("layers.") and not np.asarray(g).any()} == {
        a for a in weights if a.startswith("layers.") and (is_index(a) or a.endswith("mlp.bias"))
    }


@pytest.mark.parametrize("run", [Unroll(), Scan()], ids=["unroll", "scan"])
def test_the_index_is_neither_adapted_nor_thawed(run):
    model = CASES["deepseek-3.2"].build(run)
    adapted = swap(model, r"layers\..*", lambda of: LoRA(of, 2, 4.0))
    assert adapted
    assert not any(".index" in name for name in adapted)
    with pytest.raises(BadInput, match="only selects"):
        swap(model, r".*\.index\..*", lambda of: LoRA(of, 2, 4.0))
    freeze(model, r"mtp\..*norm.*")
    assert not any(map(is_index, thaw(model, ".*")))


def test_adapters_on_the_index_have_no_place():
    """PEFT puts them there where it adapts every linear layer."""
    modules = [site.module for site in sites(CASES["deepseek-3.2"])]
    assert any("q_b_proj" in module for module in modules)
    assert not any("indexer" in module for module in modules)


@pytest.mark.parametrize("trained", [False, True])
def test_an_adapter_on_the_index_is_left_out_where_it_does_nothing(tmp_path, trained):
    config = CASES["deepseek-3.2"]
    heads, size, rank = config.index.heads, config.index.size, config.query_rank
    b = np.ones((config.heads * (config.head_size + config.rope_size), 2), np.float32)
    factors = {
        "self_attn.q_b_proj": (np.ones((2, rank), np.float32), b),
        "self_attn.indexer.wq_b": (np.ones((2, rank), np.float32), np.full((heads * size, 2), float(trained), np.float32)),
    }
    at = "base_model.model.model.layers.1."
    tensors = {f"{at}{name}.lora_{k}.weight": f for name, pair in factors.items() for k, f in zip("AB", pair, strict=True)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    if trained:
        with pytest.raises(Unsupported, match="indexer of sparse attention"):
            read_adapter(tmp_path, config)
    else:
        assert list(read_adapter(tmp_path, config)) == ["layers.1.attn.q_up"]


def test_scores_of_a_long_sequence_are_summed_a_head_at_a_time(monkeypatch):
    draw = np.random.default_rng(0).standard_normal
    q, w, k = (jnp.asarray(draw(s), jnp.float32) for s in ((2, 5, 7, 4), (2, 5, 7), (2, 9, 4)))
    expected = np.einsum("btis,bti->bts", np.maximum(np.einsum("btij,bsj->btis", q, k), 0), w)
    assert relative(indexer.sum_scores(indexer.IndexQuery(q, w), k), expected) < 1e-5
    monkeypatch.setattr(indexer, "AT_ONCE", 100)
    assert relative(indexer.sum_scores(indexer.IndexQuery(q, w), k), expected) < 1e-5
    program = str(jax.make_jaxpr(lambda q, w, k: indexer.sum_scores(indexer.IndexQuery(q, w), k))(q, w, k))
    assert "2,5,7,9" not in program


def test_an_index_is_not_trained_from_random_weights(tmp_path):
    config = {"family": "deepseek"} | dump(CASES["deepseek-3.2"])
    (tmp_path / "sparse.yml").write_text(json.dumps(config))  # JSON is YAML
    words = [f"model={tmp_path / 'sparse.yml'}", "data.source=synthetic", "data.sequence=16", "data.batch=8", "steps=1"]
    with pytest.raises(BadInput, match="nothing trains them"):
        argosy.fit("tiny", *words, f"dir={tmp_path / 'run'}")
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------- further ahead


@pytest.fixture(scope="module")
def further(tmp_path_factory) -> Path:
    return write_model(GOLDENS / "deepseek_v3-mtp", tmp_path_factory.mktemp("mtp") / "model")


@pytest.mark.parametrize("name", ["deepseek_v3-mtp", pytest.param("deepseek_v32-groups", marks=pytest.mark.slow)])
def test_the_module_ahead_equals_the_reference(name: str, tmp_path: Path):
    """transformers' MtpModel: logits of the token after the next one."""
    model = argosy.load(write_model(GOLDENS / name, tmp_path / "model")).module
    golden = dict(np.load(GOLDENS / name / "golden.npz"))
    tokens = jnp.asarray(golden["tokens"], jnp.int32)
    graph, weights = split(model)

    @jax.jit
    def logits(weights, tokens):
        model = merge(graph, weights)
        x, _, _ = model.hidden(tokens, Packed(jnp.ones_like(tokens)))
        x, _, aux = model.ahead(1, x[:, :-1], tokens[:, 1:], Packed(jnp.ones_like(tokens[:, 1:])))
        return model.unembed(x), aux["load"]

    got, load = logits(weights, tokens)
    assert relative(got, golden["ahead"]) < LOGIT_ROUNDING
    assert float(load.sum()) == 2 * 40 * 3


def test_copies_of_embedding_and_head_must_be_copies(further: Path, tmp_path: Path):
    """They are written again (test_parity), may be absent, and may not differ."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(further / "model.safetensors")
    name = "model.layers.3.shared_head.head.weight"
    for change in ("absent", "other"):
        folder = tmp_path / change
        folder.mkdir()
        (folder / "config.json").write_text((further / "config.json").read_text())
        changed = {n: t for n, t in tensors.items() if n != name} | ({name: tensors[name] + 1} if change == "other" else {})
        save_file(changed, folder / "model.safetensors")
    assert argosy.load(tmp_path / "absent").config.mtp == 1
    with pytest.raises(BadInput, match=r"shared_head\.head\.weight` to `lm_head\.weight`"):
        argosy.load(tmp_path / "other")


def test_a_module_that_is_not_there_is_no_part_of_the_model(tmp_path: Path):
    """transformers writes num_nextn_predict_layers, and drops the tensors."""
    assert config_json("deepseek_v3-groups")["num_nextn_predict_layers"] == 1
    folder = write_model(GOLDENS / "deepseek_v3-groups", tmp_path / "model")
    assert argosy.load(folder).config.mtp == 0
    convert(str(folder), tmp_path / "again", "hub", None)
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == config["num_mtp_layers"] == 0


def test_half_a_module_is_an_error(further: Path, tmp_path: Path):
    from safetensors.numpy import load_file, save_file

    tensors = load_file(further / "model.safetensors")
    tensors.pop("model.layers.3.eh_proj.weight")
    (tmp_path / "config.json").write_text((further / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(BadInput, match="1 missing") as caught:
        argosy.load(tmp_path)
    assert "eh_proj" in (caught.value.where or "")


def test_counts_leave_out_what_logits_do_without():
    config = CASES["deepseek-3.2"]
    alone = config.model_copy(update={"mtp": 0})
    assert config.parameters() > alone.parameters()
    assert config.parameters(active=True) == alone.parameters(active=True)
    assert config.flops(23) == alone.flops(23)


# ---------------------------------------------------------------- config.json


def test_kimi_is_deepseek_v3_by_another_name(tmp_path: Path):
    config = config_json("deepseek_v3-yarn")
    assert DeepSeekConfig.from_hub(config | {"model_type": "kimi_k2"}) == DeepSeekConfig.from_hub(config)
    folder = write_model(GOLDENS / "deepseek_v3-yarn", tmp_path / "model")
    kimi = config | {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(kimi))
    golden = dict(np.load(GOLDENS / "deepseek_v3-yarn" / "golden.npz"))
    assert relative(argosy.load(folder).logits(golden["tokens"]), golden["logits"]) < LOGIT_ROUNDING
    convert(str(folder), tmp_path / "again", "hub", None)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["model_type"] == "kimi_k2"


# Keys of the published config.json, those of other files in the repository not among them.
PUBLISHED_V3 = {
    "model_type": "deepseek_v3", "aux_loss_alpha": 0.001, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
    "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True,
    "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip


def test_deepseek_v3_has_the_published_size():
    """671 billion parameters, 37 of them for each token, beside 14 billion of the module ahead, of which the copies of
    embedding and head are 1.9 (the README of deepseek-ai/DeepSeek-V3)."""
    config = DeepSeekConfig.from_hub(PUBLISHED_V3)
    alone = config.model_copy(update={"mtp": 0})
    assert round(alone.parameters() / 1e9) == 671
    assert round((alone.parameters(active=True) - 129280 * 7168) / 1e9) == 37
    assert round((config.parameters() - alone.parameters() + 2 * 129280 * 7168) / 1e9) in (13, 14)
    assert config.scale == pytest.approx(192**-0.5 * (0.1 * np.log(40) + 1) ** 2)


# What the config.json of DeepSeek-V3.2 says beside.
PUBLISHED_V32 = PUBLISHED_V3 | {
    "model_type": "deepseek_v32", "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048, "attention_bias": False,
}  # fmt: skip


def test_deepseek_v32_is_v3_with_an_index():
    config = DeepSeekConfig.from_hub(PUBLISHED_V32)
    assert config.model_dump(exclude={"preset"}) == preset_config("deepseek3.2-671b").model_dump(exclude={"preset"})
    assert config.model_copy(update={"index": None}) == DeepSeekConfig.from_hub(PUBLISHED_V3)
    assert config.to_hub()["model_type"] == "deepseek_v32"
    kinds = {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 58, "layer_types": ["indexed_attention"] * 61}
    assert DeepSeekConfig.from_hub(PUBLISHED_V32 | kinds | {"first_k_dense_replace": 7}) == config


def test_its_flops_are_counted_by_hand():
    """The index of a layer: 1536 x 64 x 128 + 7168 x (128 + 64) weights, and 64 x 129 for each pair of tokens."""
    config = DeepSeekConfig.from_hub(PUBLISHED_V32)
    plain = config.model_copy(update={"index": None})
    weights = 61 * 2 * (1536 * 64 * 128 + 7168 * 192)
    for tokens, scores in ((2048, 0), (4096, 61 * 2 * 64 * 129 * 4096 * 4096)):
        assert config.flops(tokens) - plain.flops(tokens) == tokens * weights + scores
        assert config.training_flops(tokens) - plain.training_flops(tokens) == tokens * weights + scores


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"layer_types": ["full_attention"] * 61}, "`layer_types`: only 61 times indexed_attention"),
        ({"layer_types": ["indexed_attention"] * 60}, "`layer_types`: only 61"),
        ({"mlp_layer_types": ["sparse"] * 60 + ["dense"]}, "`mlp_layer_types`: only 61 layers, dense ones before sparse ones"),
        ({"mlp_layer_types": ["dense"] * 3}, "`mlp_layer_types`"),
        ({"mlp_layer_types": 3, "layer_types": None}, "`mlp_layer_types`"),
        ({"rope_interleave": False}, "`rope_interleave`"),
        ({"indexer_rope_interleave": True}, "`indexer_rope_interleave`"),
    ],
)
def test_what_is_not_built_of_v32_is_refused(changed, complaint):
    with pytest.raises(BadInput, match=complaint):
        DeepSeekConfig.from_hub(PUBLISHED_V32 | changed)


def test_an_index_asks_with_the_latent_of_queries():
    config = CASES["deepseek-3.2"]
    for changed, complaint in (({"query_rank": None}, "set query_rank"), ({"index": Index(size=4)}, "rope_size = 6")):
        with pytest.raises(ValueError, match=complaint):
            DeepSeekConfig(**dict(config) | changed)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"moe_layer_freq": 2}, "`moe_layer_freq` = 2"),
        ({"scoring_func": "softmax"}, "`scoring_func`"),
        ({"topk_method": "greedy"}, "`topk_method`"),
        ({"num_key_value_heads": 8}, "num_key_value_heads"),
        ({"index_topk": 2048}, "`index_topk`"),  # sparse attention of V3.2
    ],
)
def test_what_is_not_built_is_refused(changed, complaint):
    with pytest.raises(BadInput, match=complaint):
        DeepSeekConfig.from_hub(PUBLISHED_V3 | changed)


def test_v2_refuses_a_normalisation_that_its_two_codes_disagree_on():
    with pytest.raises(BadInput, match="norm_topk_prob"):
        DeepSeekConfig.from_hub(config_json("deepseek_v2-lite") | {"norm_topk_prob": True})


def test_what_the_hub_cannot_say_is_not_written():
    config = CASES["deepseek-2"]
    halves = config.model_copy(update={"rope": config.rope.model_copy(update={"pairs": "halves"})})
    with pytest.raises(Unsupported, match="rope"):
        halves.to_hub()
    ahead = config.model_copy(update={"mtp": 1})
    with pytest.raises(Unsupported, match="mtp"):
        ahead.to_hub()
    indexed = config.model_copy(update={"index": Index(size=8)})
    with pytest.raises(Unsupported, match="index"):
        indexed.to_hub()
