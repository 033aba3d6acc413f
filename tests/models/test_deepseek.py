"""DeepSeek beyond the laws: the two forms of latent attention, the module that predicts further ahead, what config.json says."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_weights import write_model
from helpers import relative
from laws.families import CASES, built, forward, tokens_of

import argosy
from argosy.core.errors import BadInput, Unsupported
from argosy.jobs.convert import convert
from argosy.models.deepseek import DeepSeekConfig
from argosy.models.parts.attend import Contiguous, Packed, Paged
from argosy.models.parts.cache import contiguous, paged
from argosy.models.parts.latent import Latent
from argosy.models.parts.moe import Experts
from argosy.models.parts.stack import Unroll
from argosy.models.parts.weight import merge, split

GOLDENS = Path(__file__).parents[1] / "goldens" / "models"
TOLERANCE = 2e-5
FORMS = [True, False, None]


def config_json(name: str) -> dict:
    return json.loads((GOLDENS / name / "config.json").read_text(encoding="utf-8"))


# ---------------------------------------------------------------- absorbed and expanded


@pytest.fixture(scope="module", params=["deepseek-2", "deepseek-3"])
def latent(request):
    config = CASES[request.param]
    model, tokens = built(config, Unroll()), tokens_of(config)
    step = forward(model)
    expanded = step(tokens, Packed(jnp.ones_like(tokens), absorb=False))[0]
    return model, step, tokens, np.asarray(expanded)


@pytest.mark.parametrize("absorb", FORMS)
def test_packed_forms_are_equal(latent, absorb):
    _, step, tokens, expected = latent
    assert relative(step(tokens, Packed(jnp.ones_like(tokens), absorb))[0], expected) < TOLERANCE


@pytest.mark.parametrize("absorb", FORMS)
def test_contiguous_forms_are_equal(latent, absorb):
    model, step, tokens, expected = latent
    cache, outs = contiguous(model.layers.holds(), *tokens.shape), []
    for low, high in [(0, 30), (30, 31), (31, 41)]:
        at = jnp.broadcast_to(jnp.arange(low, high, dtype=jnp.int32), (2, high - low))
        attend = Contiguous(at, jnp.ones_like(at, bool), absorb, fresh=low == 0)
        logits, cache, _ = step(tokens[:, low:high], attend, cache)
        outs.append(logits)
    assert relative(jnp.concatenate(outs, 1), expected) < TOLERANCE


@pytest.mark.parametrize("absorb", FORMS)
def test_paged_forms_are_equal(latent, absorb):
    model, step, tokens, expected = latent
    cache, outs = paged(model.layers.holds(), 2, 24, 4), []
    table = jnp.asarray(np.random.default_rng(0).permutation(24)[:22].reshape(2, 11), jnp.int32)
    for low, high in [(0, 30), (30, 31), (31, 41)]:
        t = jnp.broadcast_to(jnp.arange(high - low, dtype=jnp.int32), (2, high - low))
        told = jnp.full(2, low, jnp.int32), jnp.full(2, high - low, jnp.int32)
        logits, cache, _ = step(tokens[:, low:high], Paged(table, jnp.arange(2, dtype=jnp.int32), *told, t, absorb), cache)
        outs.append(logits)
    assert relative(jnp.concatenate(outs, 1), expected) < TOLERANCE


def test_only_latents_and_rope_are_kept(latent):
    """R + P numbers a token and layer, whatever the number of heads."""
    model, config = latent[0], latent[0].config
    assert {spec.token for spec, _ in model.layers.holds().values()} == {
        (("latent", (config.latent_rank,)), ("rope", (config.rope_size,)))
    }


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


# ---------------------------------------------------------------- further ahead


@pytest.fixture(scope="module")
def further(tmp_path_factory) -> Path:
    return write_model(GOLDENS / "deepseek_v3-mtp", tmp_path_factory.mktemp("mtp") / "model")


def test_the_module_ahead_equals_the_reference(further: Path):
    """transformers' MtpModel: logits of the token after the next one."""
    model = argosy.load(further).module
    golden = dict(np.load(GOLDENS / "deepseek_v3-mtp" / "golden.npz"))
    tokens = jnp.asarray(golden["tokens"], jnp.int32)
    graph, weights = split(model)

    @jax.jit
    def logits(weights, tokens):
        model = merge(graph, weights)
        x, _, _ = model.hidden(tokens, Packed(jnp.ones_like(tokens)))
        x, _, told = model.ahead(1, x[:, :-1], tokens[:, 1:], Packed(jnp.ones_like(tokens[:, 1:])))
        return model.unembed(x), told["load"]

    got, load = logits(weights, tokens)
    assert relative(got, golden["ahead"]) < TOLERANCE
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
    with pytest.raises(BadInput, match=r"shared_head\.head\.weight` is tied to `lm_head\.weight`"):
        argosy.load(tmp_path / "other")


def test_a_module_that_is_not_there_is_no_part_of_the_model(tmp_path: Path):
    """transformers writes num_nextn_predict_layers, and drops the tensors."""
    assert config_json("deepseek_v3-groups")["num_nextn_predict_layers"] == 1
    folder = write_model(GOLDENS / "deepseek_v3-groups", tmp_path / "model")
    assert argosy.load(folder).config.mtp == 0
    convert(str(folder), tmp_path / "again", "hub", None)
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert written["num_nextn_predict_layers"] == written["num_mtp_layers"] == 0


def test_half_a_module_is_an_error(further: Path, tmp_path: Path):
    from safetensors.numpy import load_file, save_file

    tensors = load_file(further / "model.safetensors")
    tensors.pop("model.layers.3.eh_proj.weight")
    (tmp_path / "config.json").write_text((further / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(BadInput, match="1 missing") as told:
        argosy.load(tmp_path)
    assert "eh_proj" in (told.value.where or "")


def test_counts_leave_out_what_logits_do_without():
    config = CASES["deepseek-3"]
    alone = config.model_copy(update={"mtp": 0})
    assert config.parameters() > alone.parameters()
    assert config.parameters(active=True) == alone.parameters(active=True)
    assert config.flops(23) == alone.flops(23)


# ---------------------------------------------------------------- config.json


def test_kimi_is_deepseek_v3_by_another_name(tmp_path: Path):
    said = config_json("deepseek_v3-yarn")
    assert DeepSeekConfig.from_hub(said | {"model_type": "kimi_k2"}) == DeepSeekConfig.from_hub(said)
    folder = write_model(GOLDENS / "deepseek_v3-yarn", tmp_path / "model")
    kimi = said | {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(kimi))
    golden = dict(np.load(GOLDENS / "deepseek_v3-yarn" / "golden.npz"))
    assert relative(argosy.load(folder).logits(golden["tokens"]), golden["logits"]) < TOLERANCE
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
