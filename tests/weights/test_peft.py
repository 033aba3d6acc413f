"""Adapters of the PEFT library: goldens that it wrote (tests/reference/adapters.py), and folders of ours read again."""

import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from golden_weights import write_model
from helpers import LOGIT_ROUNDING, default, relative
from laws.families import CASES, FULLEST

import argosy
from argosy.adapt.lora import LoRA, merge, unmerge
from argosy.adapt.surgery import find, swap
from argosy.checkpoint.open import open_model
from argosy.core.errors import BadInput, Unsupported
from argosy.core.formats.safetensors import SafeTensors
from argosy.infer.load import load_lm
from argosy.jobs.convert import convert
from argosy.models.parts.stack import Scan
from argosy.models.parts.stack.addresses import layer_addresses
from argosy.models.parts.weight import fill, variables
from argosy.weights.peft.merge import merged_weights
from argosy.weights.peft.reader import read_adapter, read_contents
from argosy.weights.peft.sites import CONFIG, WEIGHTS, Adapter, PeftContents, sites
from argosy.weights.peft.writer import adapters_of, write_adapter

ADAPTERS = Path(__file__).parents[1] / "goldens" / "adapters"
NAMES = sorted(folder.name for folder in ADAPTERS.iterdir())


@pytest.fixture(scope="module", params=default("gemma2-plain", "llama-grouped", "llama-multi-head-biased", of=NAMES))
def case(request, tmp_path_factory) -> tuple[Path, Path, dict[str, np.ndarray]]:
    """The base model's folder, the adapter's, and what PEFT says."""
    base = write_model(ADAPTERS.parent / "models" / request.param, tmp_path_factory.mktemp("base") / request.param)
    return base, ADAPTERS / request.param, dict(np.load(ADAPTERS / request.param / "golden.npz"))


def test_logits_equal_the_library(case):
    base, adapter, golden = case
    assert relative(argosy.load(base, adapter=adapter).logits(golden["tokens"]), golden["logits"]) < LOGIT_ROUNDING
    assert relative(argosy.load(base).logits(golden["tokens"]), golden["logits"]) > 0.1, "the adapter does nothing"


def test_merged_on_the_way_and_in_memory(case, tmp_path):
    base, adapter, golden = case
    convert(str(base), tmp_path / "merged", "hub", None, adapter=str(adapter))
    assert relative(argosy.load(tmp_path / "merged").logits(golden["tokens"]), golden["logits"]) < LOGIT_ROUNDING
    lm = argosy.load(base, adapter=adapter)
    adapters = adapters_of(lm.module)
    before = lm.logits(golden["tokens"])
    assert sorted(lm.merge(keep=True)) == sorted(adapters)
    assert relative(lm.logits(golden["tokens"]), golden["logits"]) < LOGIT_ROUNDING
    with pytest.raises(BadInput, match="no adapters"):
        adapters_of(lm.module)
    assert sorted(lm.unmerge()) == sorted(adapters)
    np.testing.assert_array_equal(lm.logits(golden["tokens"]), before)
    with pytest.raises(BadInput, match="no merged adapters were kept"):
        lm.unmerge()


def test_merged_weights_keep_their_type_and_go_back_where_they_were(tmp_path):
    base = write_model(ADAPTERS.parent / "models" / "llama-grouped", tmp_path / "base")
    lm = argosy.load(base, adapter=ADAPTERS / "llama-grouped", dtype="bfloat16")
    original_weights = {}
    names = merge(lm.module, original_weights)
    assert {str(v.dtype) for v in variables(lm.module).values()} == {"bfloat16"}
    scanned = load_lm(base, run=Scan())
    with pytest.raises(BadInput, match=r"no such contraction.*layers\.0"):
        unmerge(scanned.module, original_weights)
    assert unmerge(lm.module, original_weights) == names


def test_an_adapter_is_merged_in_slabs(tmp_path, monkeypatch):
    base = write_model(ADAPTERS.parent / "models" / "llama-grouped", tmp_path / "base")
    weights, config = open_model(base).weights, open_model(base).config
    adapters = read_adapter(ADAPTERS / "llama-grouped", config)
    whole = {name: merged_weights(weights, PeftContents(adapters), config).read(name) for name in weights.names}
    monkeypatch.setattr("argosy.weights.peft.merge.SLAB_BYTES", 1000)
    for name, expected in whole.items():
        np.testing.assert_allclose(merged_weights(weights, PeftContents(adapters), config).read(name), expected, rtol=1e-6, atol=1e-7)


def test_written_again_it_is_the_same(case, tmp_path):
    base, adapter, _ = case
    lm = argosy.load(base, adapter=adapter)
    lm.save(tmp_path / "again", format="peft")
    theirs, ours = SafeTensors.open(adapter / WEIGHTS), SafeTensors.open(tmp_path / "again" / WEIGHTS)
    assert sorted(ours.names) == sorted(theirs.names)
    for name in theirs.names:
        np.testing.assert_array_equal(ours.read(name), theirs.read(name))
    read = [read_contents(folder, lm.config).adapters for folder in (adapter, tmp_path / "again")]
    assert {n: a.gain for n, a in read[0].items()} == pytest.approx({n: a.gain for n, a in read[1].items()})


def test_parts_of_a_fused_module_that_differ_become_one_adapter(tmp_path):
    """Queries and values of Phi, adapted apart, in the stacked layout, are one module on the Hub."""
    base = write_model(ADAPTERS.parent / "models" / "phi3-window", tmp_path / "base")
    lm = argosy.load(base)
    model = lm.config.build(Scan())
    from argosy.weights.fill import read_into

    read_into(model, open_model(base).weights)
    swap(model, r"layers\.block\.attn\.[qv]", lambda of: LoRA(of, 2, 3.0))
    fill(model, jax.random.key(0), addresses=layer_addresses(model))
    for kind in "qv":
        factor = getattr(model.layers.block.attn, kind).b
        factor.set_value(jax.random.normal(jax.random.key(ord(kind)), factor.shape))
    adapted = argosy.LM(lm.config, model)
    adapted.save(tmp_path / "adapter", format="peft")
    assert json.loads((tmp_path / "adapter" / CONFIG).read_text())["r"] == 4
    tokens = np.arange(3, 20)
    again = argosy.load(base, adapter=tmp_path / "adapter")
    assert relative(again.logits(tokens), adapted.logits(tokens)) < LOGIT_ROUNDING
    assert relative(lm.logits(tokens), adapted.logits(tokens)) > 1e-2


@pytest.mark.slow
def test_experts_have_an_adapter_each(tmp_path):
    base = write_model(ADAPTERS.parent / "models" / "mixtral-plain", tmp_path / "base")
    lm = argosy.load(base)
    swap(lm.module, r"layers\..*\.(gate|down|router)", lambda of: LoRA(of, 3, 2.0))
    fill(lm.module, jax.random.key(1), addresses=layer_addresses(lm.module))
    for i in range(lm.config.layers):
        factor = getattr(lm.module.layers, str(i)).mlp.down.b
        factor.set_value(0.1 * jax.random.normal(jax.random.key(i), factor.shape))
    adapted = argosy.LM(lm.config, lm.module)
    adapted.save(tmp_path / "adapter", format="peft")
    names = SafeTensors.open(tmp_path / "adapter" / WEIGHTS).names
    assert "base_model.model.model.layers.1.block_sparse_moe.experts.4.w2.lora_B.weight" in names
    tokens = np.arange(3, 20)
    again = argosy.load(base, adapter=tmp_path / "adapter")
    assert relative(again.logits(tokens), adapted.logits(tokens)) < LOGIT_ROUNDING
    both = merged_weights(open_model(base).weights, read_contents(tmp_path / "adapter", lm.config), lm.config)
    for name in ("layers.1.mlp.down.w", "layers.1.mlp.router.w", "layers.1.mlp.up.w"):
        whole = both.read(name)
        np.testing.assert_array_equal(np.stack([both.read_part(name, i) for i in range(len(whole))]), whole)
    assert both.is_apart("layers.1.mlp.down.w")
    convert(str(base), tmp_path / "merged", "hub", None, adapter=str(tmp_path / "adapter"))
    assert relative(argosy.load(tmp_path / "merged").logits(tokens), adapted.logits(tokens)) < LOGIT_ROUNDING


def test_the_page_on_adapters_runs(tmp_path, monkeypatch):
    """docs/adapters.md, its programs as they stand."""
    write_model(ADAPTERS.parent / "models" / "llama-grouped", tmp_path / "model")
    page = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text(encoding="utf-8")
    names: dict = {}
    for program in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(program.replace("path/to", str(tmp_path)), names)
    assert (tmp_path / "adapter" / WEIGHTS).exists()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FULLEST else pytest.mark.slow)
        for name, config in CASES.items()
        if config.causal
    ],
)
def test_every_contraction_of_every_family_goes_out_and_in(name, tmp_path):
    """But for experts in one tensor, which PEFT has another form for."""
    config, draw = CASES[name], np.random.default_rng(0).standard_normal
    specs = find(config.build(), r"layers\..*")
    homes = {n: site for site in sites(config) for n in site.weights}
    stacked = {n for n, m in specs.items() if m.group and n not in homes}
    assert set(specs) - set(homes) == stacked
    assert not stacked or name.startswith(("gpt_oss", "llama4"))
    factors = {}
    for site in dict.fromkeys(homes[n] for n in specs if n in homes):
        first = specs[site.weights[0]]
        a = draw([first.sizes[x] for x in first.group + first.inner] + [2]).astype(np.float32)
        for n in site.weights:
            of = specs[n]
            shape = [of.sizes[x] for x in of.group] + [2] + [of.sizes[x] for x in of.out if x in of.spec]
            factors[n] = Adapter(a, draw(shape).astype(np.float32), 1.5)
    magnitudes = {n: draw([specs[n].sizes[x] for x in specs[n].kept]).astype(np.float32) for n in factors}
    dora = {n: adapter._replace(m=magnitudes[n]) for n, adapter in factors.items()}
    for name, adapters in (("lora", factors), ("dora", dora)):
        write_adapter(tmp_path / name, config, adapters)
        read = read_adapter(tmp_path / name, config)
        assert set(read) == set(adapters)
        for n, (a, b, gain, m) in adapters.items():
            np.testing.assert_array_equal(read[n].a, a)
            np.testing.assert_array_equal(read[n].b, b)
            assert read[n].gain == pytest.approx(gain)
            assert (read[n].m is None) == (m is None)
            np.testing.assert_array_equal(read[n].m, m)


def test_an_alpha_by_module_holds_for_experts_too(tmp_path):
    """Written by us, as a pattern for each expert; and told by one expression for all of them."""
    config = CASES["mixtral-plain"]
    E, D, M = config.moe.count, config.width, config.moe.ffn
    draw = np.random.default_rng(0).standard_normal
    a, b = draw((E, D, 2)).astype(np.float32), draw((E, 2, M)).astype(np.float32)
    factors = {"layers.1.mlp.gate": Adapter(a, b, 4.0), "layers.1.mlp.up": Adapter(a, b, 0.5)}
    write_adapter(tmp_path / "adapter", config, factors)
    assert {n: f.gain for n, f in read_adapter(tmp_path / "adapter", config).items()} == {
        n: f.gain for n, f in factors.items()
    }
    adapter_config = json.loads((tmp_path / "adapter" / CONFIG).read_text()) | {"lora_alpha": 8}
    for patterns, gain in (({r"experts\.\d+\.w3": 3}, 1.5), ({}, 4.0)):
        (tmp_path / "adapter" / CONFIG).write_text(json.dumps(adapter_config | {"alpha_pattern": patterns}))
        assert read_adapter(tmp_path / "adapter", config)["layers.1.mlp.up"].gain == gain
    (tmp_path / "adapter" / CONFIG).write_text(json.dumps(adapter_config | {"alpha_pattern": {r"experts\.0\.w3": 3}}))
    with pytest.raises(Unsupported, match="with different alphas"):
        read_adapter(tmp_path / "adapter", config)


def test_an_adapter_on_a_tied_embedding_is_refused(tmp_path):
    """In PEFT the head does not see it; merged, it does."""
    config = CASES["mixtral-window"]
    assert config.tied
    factors = Adapter(np.ones((config.vocab, 2), np.float32), np.ones((2, config.width), np.float32), 1.0)
    write_adapter(tmp_path / "adapter", config.model_copy(update={"tied": False}), {"embed": factors})
    for refused in (read_adapter, lambda folder, config: write_adapter(folder / "again", config, {"embed": factors})):
        with pytest.raises(Unsupported, match="the head is tied"):
            refused(tmp_path / "adapter", config)


@pytest.fixture
def broken_adapter(tmp_path):
    """A golden adapter's copy, to be broken."""
    shutil.copytree(ADAPTERS / "llama-grouped", tmp_path / "adapter")
    config = open_model(write_model(ADAPTERS.parent / "models" / "llama-grouped", tmp_path / "base")).config
    return tmp_path / "adapter", config


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"use_qalora": True}, Unsupported, "use_qalora"),
        ({"bias": "all"}, Unsupported, "bias"),
        ({"modules_to_save": ["lm_head"]}, BadInput, "modules_to_save has lm_head, and the file no such tensors"),
        ({"peft_type": "IA3"}, Unsupported, "IA3"),
        ({"init_lora_weights": "pissa"}, Unsupported, "init_lora_weights = 'pissa' changes the weights of the base"),
        ({"init_lora_weights": "pissa_niter_16"}, Unsupported, "init_lora_weights = 'pissa_niter_16'"),
        ({"init_lora_weights": "olora"}, Unsupported, "init_lora_weights = 'olora'"),
        ({"init_lora_weights": "corda"}, Unsupported, "init_lora_weights = 'corda'"),
        ({"init_lora_weights": "loftq"}, Unsupported, "init_lora_weights = 'loftq'"),
        ({"init_lora_weights": "lora_ga"}, Unsupported, "init_lora_weights = 'lora_ga'"),
        ({"lora_alpha": None}, BadInput, "`lora_alpha` is null, not a number"),
        ({"lora_alpha": "16"}, BadInput, "`lora_alpha` is '16', not a number"),
        ({"lora_dropout": "a little"}, BadInput, "`lora_dropout` is 'a little', not a number"),
        ({"alpha_pattern": {"q_proj": None}}, BadInput, "`q_proj` is null, not a number"),
        ({"alpha_pattern": {"(": 2}}, BadInput, "`\\(` in alpha_pattern is no pattern"),
        ({"alpha_pattern": ["q_proj"]}, BadInput, "alpha_pattern is not an object"),
        ({"modules_to_save": "lm_head"}, BadInput, "modules_to_save is not a list of names"),
    ],
)
def test_what_would_change_the_function_is_refused(broken_adapter, changes, error, match):
    folder, config = broken_adapter
    old = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(old | changes))
    with pytest.raises(error, match=match):
        read_adapter(folder, config)


@pytest.mark.parametrize("start", [True, False, None, "gaussian", "eva", "orthogonal"])
def test_an_initialization_that_leaves_the_base_alone_is_read(broken_adapter, start):
    folder, config = broken_adapter
    expected = read_adapter(folder, config)
    (folder / CONFIG).write_text(json.dumps(json.loads((folder / CONFIG).read_text()) | {"init_lora_weights": start}))
    assert read_adapter(folder, config).keys() == expected.keys()


def rewrite(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    from safetensors.numpy import save_file

    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, folder / WEIGHTS)


def test_the_bases_own_weights_beside_adapters_on_an_embedding_and_a_head(tmp_path):
    """What PEFT saves by default for these modules (save_embedding_layers="auto"), on the model that its logits are known of."""
    golden, folder = dict(np.load(ADAPTERS / "qwen3-plain" / "golden.npz")), tmp_path / "adapter"
    base = write_model(ADAPTERS.parent / "models" / "qwen3-plain", tmp_path / "base")
    shutil.copytree(ADAPTERS / "qwen3-plain", folder)
    weights, file = open_model(base).weights, SafeTensors.open(folder / WEIGHTS)
    addresses = {"model.embed_tokens": "embed.w", "lm_head": "head.w"}
    # The head is stored the other way around: read as the Hub has it.
    theirs = {name: np.asarray(weights.read(ours)) for name, ours in addresses.items()}
    theirs["lm_head"] = theirs["lm_head"].T
    arrays = {name: np.array(file.read(name)) for name in file.names}
    saved = {f"base_model.model.{name}.base_layer.weight": array for name, array in theirs.items()}
    rewrite(folder, arrays | saved)
    assert relative(argosy.load(base, adapter=folder).logits(golden["tokens"]), golden["logits"]) < LOGIT_ROUNDING
    convert(str(base), tmp_path / "merged", "hub", None, adapter=str(folder))
    assert relative(argosy.load(tmp_path / "merged").logits(golden["tokens"]), golden["logits"]) < LOGIT_ROUNDING
    with pytest.raises(Unsupported, match="weights of the base beside other adapters"):
        read_adapter(folder, open_model(base).config)
    rewrite(folder, arrays | {name: array + 1 for name, array in saved.items()})
    with pytest.raises(Unsupported, match=r"`base_layer\.weight` of `(embed|head)` is not that of the base model"):
        argosy.load(base, adapter=folder)
    with pytest.raises(Unsupported, match=r"is not that of the base model"):
        convert(str(base), tmp_path / "again", "hub", None, adapter=str(folder))


def test_an_adapter_on_a_tied_head_is_refused_by_name(tmp_path):
    golden, base = ADAPTERS / "qwen3-plain", write_model(ADAPTERS.parent / "models" / "qwen2-tied", tmp_path / "base")
    config = open_model(base).config
    shutil.copytree(golden, tmp_path / "adapter")
    file = SafeTensors.open(golden / WEIGHTS)
    rewrite(tmp_path / "adapter", {name: np.array(file.read(name)) for name in file.names if "lm_head" in name})
    with pytest.raises(Unsupported, match="`lm_head`, which is tied to the embedding"):
        read_adapter(tmp_path / "adapter", config)


def test_an_adapter_of_another_model_is_refused(broken_adapter):
    folder, config = broken_adapter
    with pytest.raises(BadInput):
        read_adapter(folder, config.model_copy(update={"width": 48}))
    with pytest.raises(BadInput, match="belong to no module"):
        read_adapter(folder, config.model_copy(update={"layers": 1}))
    with pytest.raises(BadInput, match=CONFIG):
        read_adapter(folder.parent / "base", config)


def test_a_model_without_adapters_has_none_to_save_or_merge(tmp_path):
    lm = argosy.load(write_model(ADAPTERS.parent / "models" / "llama-grouped", tmp_path / "base"))
    with pytest.raises(BadInput, match="no adapters"):
        lm.save(tmp_path / "adapter", format="peft")
    with pytest.raises(BadInput):
        lm.merge()


def test_an_adapter_is_written_completely_or_not_at_all(case, tmp_path, monkeypatch):
    base, adapter, _ = case
    config = open_model(base).config
    adapters, whole, *_ = read_contents(adapter, config)

    def cut(self, files, *_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("argosy.weights.staging.StagedFolder.write", cut)
        with pytest.raises(OSError, match="No space left"):
            write_adapter(tmp_path / "adapter", config, adapters, whole=whole)
    assert list(tmp_path.iterdir()) == []
    write_adapter(tmp_path / "adapter", config, adapters, whole=whole)
    assert sorted(f.name for f in (tmp_path / "adapter").iterdir()) == [CONFIG, WEIGHTS]
