"""Bundles of models equal the module they were made of, to the last bit, where no model can be imported."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bundle_files import run_alone
from helpers import default, shared, stories_model
from laws.families import CASES, noisy_model, tokens_of

import argosy
from argosy.adapt.lora import LoRA
from argosy.adapt.surgery import swap
from argosy.core.errors import BadInput, UnknownName
from argosy.data.tokenizers.load import find_tokenizer
from argosy.export.bundle import Bundle
from argosy.export.lower import portable
from argosy.export.model import export_model
from argosy.infer.lm import LM
from argosy.models import FAMILIES
from argosy.models.parts.stack import Scan, Unroll
from argosy.models.parts.stack.addresses import layer_addresses
from argosy.models.parts.texts import pool_tokens
from argosy.models.parts.weight import fill, merge, split
from argosy.weights.build import random_model

ENCODERS = [name for name, config in CASES.items() if not config.causal]
DECODERS = ["llama-window", "gemma-3", "gpt_oss-plain"]
# What compiles for seconds.
REST = [name for name, config in CASES.items() if name not in (*ENCODERS, *DECODERS)]
ROUNDED = [name for name in REST if CASES[name].recurrent or CASES[name].experts is not None]
MORE = [name for name in REST if name not in ROUNDED]
ROWS, LENGTH = 2, 13


def model_of(case: str, run: Any = None) -> LM:
    return LM(CASES[case], noisy_model(CASES[case], run or Unroll()))


def expected(lm: LM, tokens: Any, mask: Any, platforms: Any = ("cpu", "tpu")) -> np.ndarray:
    """What the module computes under jit, with the implementations of ops that are portable."""
    graph, weights = split(lm.module)

    def forward(weights, tokens, mask):
        model = merge(graph, weights)
        model.dtype = lm.module.dtype
        attend = lm.config.attend(mask)
        if lm.config.causal:
            return model(tokens, attend)[0]
        vectors = pool_tokens(model.hidden(tokens, attend)[0].astype(jnp.float32), mask, lm.config.pooling)[:, 0]
        return vectors if lm.config.pooling == "mean" else model.project(vectors)

    with portable(platforms):
        return np.asarray(jax.jit(forward)(weights, tokens, mask))


def rows_of(config: Any) -> dict[str, np.ndarray]:
    """Two rows of different lengths."""
    tokens, mask = np.asarray(tokens_of(config, ROWS, LENGTH)).copy(), np.ones((ROWS, LENGTH), np.int32)
    tokens[1, 9:], mask[1, 9:] = 0, 0
    return {"tokens": tokens, "mask": mask}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The outputs of each case's bundle from one process under an import ban, and what its module computes."""
    folder = tmp_path_factory.mktemp("bundles")

    def outputs(cases: list[str]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        models = {case: model_of(case) for case in cases}
        for case, lm in models.items():
            export_model(lm, folder / case, batch=ROWS, length=LENGTH)
        rows = {case: rows_of(CASES[case]) for case in cases}
        results = run_alone([{"bundle": folder / case, "inputs": rows[case]} for case in cases], folder)
        want = {case: expected(models[case], *rows[case].values()) for case in cases}
        return {case: (next(iter(case_outputs.values())), want[case]) for case, case_outputs in zip(cases, results, strict=True)}

    return outputs


@pytest.fixture(scope="module")
def by_default(alone):
    return alone([*ENCODERS, *DECODERS])


@pytest.fixture(scope="module")
def the_rest(alone):
    return alone(MORE)


@pytest.fixture(scope="module")
def by_rounding(alone):
    return alone(ROUNDED)


@pytest.mark.parametrize("case", [*ENCODERS, *DECODERS])
def test_a_bundle_equals_the_module_to_the_last_bit(case, by_default):
    np.testing.assert_array_equal(*by_default[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE)
def test_every_other_family_equals_its_module_to_the_last_bit(case, the_rest):
    np.testing.assert_array_equal(*the_rest[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", ROUNDED)
def test_recurrent_layers_and_experts_equal_their_module_to_rounding(case, by_rounding):
    """Between two processes their bits differed by a cause that is not known: those of recurrent layers in one run of three, those of
    qwen-2-experts in one of many."""
    got, want = by_rounding[case]
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())


def test_every_encoder_family_is_met():
    assert {type(CASES[case]) for case in ENCODERS} == {type(c) for c in CASES.values() if not c.causal}


@pytest.mark.parametrize("run", [Unroll(), Scan()], ids=["unroll", "scan"])
def test_one_program_takes_every_size(run, tmp_path):
    lm = model_of("bert-pooler", run)
    export_model(lm, tmp_path / "b", platforms=["cpu"])
    bundle = Bundle.open(tmp_path / "b")
    for shape in ((1, 3), (3, 7)):
        tokens = np.random.default_rng(0).integers(3, lm.config.vocab, shape).astype(np.int32)
        got = bundle.run({"tokens": tokens})["embedding"]
        np.testing.assert_array_equal(got, expected(lm, tokens, np.ones_like(tokens), ["cpu"]))


@pytest.mark.parametrize(("case", "signature", "output"), [("llama-plain", "logits", "logits"), ("bert-plain", "embed", "embedding")])
def test_smaller_calls_are_filled_up_to_listed_sizes(case, signature, output, tmp_path):
    """What fills a row up is no token of it: the mean over an encoder's tokens leaves it out."""
    lm = model_of(case)
    export_model(lm, tmp_path / "b", platforms=["cpu"], batch=[2, 4], length=[8])
    bundle = Bundle.open(tmp_path / "b")
    assert [program.shapes for program in bundle.manifest.signatures[signature].programs] == [
        {"batch": 2, "length": 8},
        {"batch": 4, "length": 8},
    ]
    tokens = np.random.default_rng(0).integers(3, lm.config.vocab, (3, 5)).astype(np.int32)
    got = bundle.run({"tokens": tokens})[output]
    np.testing.assert_allclose(got, expected(lm, tokens, np.ones_like(tokens)), rtol=0, atol=2e-5)
    with pytest.raises(BadInput, match="no program for batch 5, length 5"):
        bundle.run({"tokens": np.ones((5, 5), np.int32)})
    with pytest.raises(BadInput, match="`length` is 9 in input `tokens`, and at most 8"):
        bundle.run({"tokens": np.ones((1, 9), np.int32)})


FEW_BITS = [("w8", {"int8"}), ("w4", {"uint8", "int8"}), ("fp8", {"float8_e4m3fn"}), ("w8a8", {"int8"})]


@pytest.mark.parametrize(
    ("preset", "dtypes"),
    default(("w4", {"uint8", "int8"}), ("fp8", {"float8_e4m3fn"}), of=FEW_BITS),
)
def test_few_bits_stay_few_bits(preset, dtypes, tmp_path):
    lm = model_of("llama-plain")
    plain = sum(np.asarray(w).nbytes for w in split(lm.module)[1].values())
    lm.quantize(preset)
    export_model(lm, tmp_path / "b", batch=ROWS, length=LENGTH, platforms=["cpu"])
    bundle = Bundle.open(tmp_path / "b")
    weights = split(lm.module)[1]
    stored = {name: str(bundle.weight(name).dtype) for name in weights}
    assert stored == {name: str(w.dtype) for name, w in weights.items()}
    assert dtypes & set(stored.values())
    assert sum(bundle.weight(name).nbytes for name in weights) < 0.6 * plain
    rows = rows_of(lm.config)
    np.testing.assert_array_equal(bundle.run(rows)["logits"], expected(lm, *rows.values(), ["cpu"]))


def test_bfloat16_and_adapters_stay_as_they_are(tmp_path):
    lm = model_of("llama-plain")
    swap(lm.module, r"layers\..*", lambda of: LoRA(of, 3, 6.0))
    fill(lm.module, jax.random.key(1), addresses=layer_addresses(lm.module))
    for address, v in split(lm.module)[1].items():
        assert v.dtype == jnp.float32, address
    lm.module.dtype = jnp.bfloat16
    export_model(lm, tmp_path / "b", batch=ROWS, length=LENGTH, platforms=["cpu"])
    rows = rows_of(lm.config)
    got = Bundle.open(tmp_path / "b").run(rows)["logits"]
    np.testing.assert_array_equal(got, expected(lm, *rows.values(), ["cpu"]))
    assert not np.array_equal(got, expected(model_of("llama-plain"), *rows.values(), ["cpu"])), "activations in float32"


# ---------------------------------------------------------------- text


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A sentence encoder with random weights, as a folder of sentence-transformers."""
    folder = tmp_path_factory.mktemp("encoder") / "model"
    config = FAMILIES["bert"].examples()["plain"].model_copy(update={"vocab": 30522, "layers": 1})
    LM(config, random_model(config, 0).module, find_tokenizer(str(shared("tokenizers/bert_uncased_vocab.txt")))).save(folder)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    steps = [{"path": "1_Pooling" if kind == "Pooling" else "", "type": kind} for kind in ("Transformer", "Pooling", "Normalize")]
    (folder / "modules.json").write_text(json.dumps(steps))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 12, "do_lower_case": true}')
    (folder / "config_sentence_transformers.json").write_text('{"prompts": {"q": "query: "}, "default_prompt_name": "q"}')
    return folder


def test_texts_become_the_vectors_of_the_model(encoder, tmp_path):
    """Tokenizer, prompt, cutting, pooling and scaling are all in the bundle."""
    lm = argosy.load(encoder)
    lm.export(tmp_path / "b", platforms=["cpu"])
    texts = ["A boat.", "  the SHIP sails over the sea, and then it sails on and on and on", "x"]
    (outputs_of,) = run_alone([{"bundle": tmp_path / "b", "inputs": {"text": texts}}], tmp_path)
    np.testing.assert_allclose(outputs_of["embedding"], lm.embed(texts), rtol=0, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(outputs_of["embedding"], axis=1), 1, atol=1e-6)
    bundle = Bundle.open(tmp_path / "b")
    assert bundle.warm_up() == 1
    for text, row in zip(texts, outputs_of["embedding"], strict=True):
        np.testing.assert_allclose(bundle.run({"text": [text]})["embedding"][0], row, rtol=0, atol=1e-6)
    with pytest.raises(BadInput, match="`text` and `tokens`"):
        bundle.run({"text": texts, "tokens": np.ones((3, 4), np.int32)})


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    lm = argosy.load(stories_model())
    path = tmp_path_factory.mktemp("stories") / "b"
    lm.export(path, signature="generate", platforms=["cpu"], length=24, max_tokens=20)
    return lm, path


def test_generation_gives_the_tokens_of_the_engine(stories, tmp_path):
    lm, path = stories
    prompts = ["Once upon a time", "The cat", "Lily saw a dog. She"]
    (outputs_of,) = run_alone([{"bundle": path, "inputs": {"text": prompts}}], tmp_path)
    for text, row, length, completion in zip(
        outputs_of["text"], outputs_of["tokens"], outputs_of["lengths"], lm.generate(prompts, 20), strict=True
    ):
        assert row[:length].tolist() == completion.tokens
        assert text == completion.text
        assert not row[length:].any()


@pytest.mark.slow
def test_generation_ends_at_the_end_of_sequence(tmp_path):
    """Both rows end where the engine's do, one of them before the other, and nothing stands after it."""
    lm = argosy.load(stories_model())
    free = lm.generate(["Once upon a time", "The cat"], 20)
    stop = free[0].tokens[6]
    lm.generation = {"eos_token_id": [int(stop)]}
    lm.export(tmp_path / "b", signature="generate", platforms=["cpu"], length=24, max_tokens=20)
    ended = lm.generate(["Once upon a time", "The cat"], 20)
    assert len(ended[0].tokens) <= 6
    assert ended[0].finish_reason == "stop"
    outputs_of = Bundle.open(tmp_path / "b").run({"text": ["Once upon a time", "The cat"]})
    assert [row[:n].tolist() for row, n in zip(outputs_of["tokens"], outputs_of["lengths"], strict=True)] == [c.tokens for c in ended]


def test_a_completion_depends_on_its_own_row(stories):
    bundle = Bundle.open(stories[1])
    long, short = "Once upon a time, there was a little", "The"
    both = bundle.run({"text": [short, long], "temperature": [0.0, 0.9], "seed": 5, "max_tokens": 6})
    assert both["lengths"].max() <= 6
    assert bundle.run({"text": [short], "max_tokens": 6})["tokens"][0].tolist() == both["tokens"][0].tolist()
    again = bundle.run({"text": [short, long], "temperature": [0.0, 0.9], "seed": 5, "max_tokens": 6})
    other = bundle.run({"text": [short, long], "temperature": [0.0, 0.9], "seed": 6, "max_tokens": 6})
    assert again["tokens"].tolist() == both["tokens"].tolist()
    assert other["tokens"][0].tolist() == both["tokens"][0].tolist()
    assert other["tokens"][1].tolist() != both["tokens"][1].tolist()


@pytest.mark.parametrize(
    ("inputs", "problem"),
    [
        ({"tokens": [[1, -1]]}, "input `tokens` has -1, and this signature takes 0 to 511"),
        ({"tokens": [[1, 512]]}, "input `tokens` has 512, and this signature takes 0 to 511"),
        ({"mask": [[1, 2]]}, "input `mask` has 2, and this signature takes 0 to 1"),
        ({"temperature": [-0.5]}, r"input `temperature` has -0\.5, and this signature takes 0\.0 and more"),
        ({"temperature": [float("nan")]}, "input `temperature` has nan"),
        ({"max_tokens": 0}, "input `max_tokens` has 0, and this signature takes 1 to 20"),
        ({"max_tokens": 21}, "input `max_tokens` has 21, and this signature takes 1 to 20"),
    ],
)
def test_numbers_that_a_model_has_no_meaning_for_are_refused(inputs, problem, stories):
    """A table of embeddings would answer with another token's row."""
    bundle = Bundle.open(stories[1])
    with pytest.raises(BadInput, match=problem):
        bundle.run({"tokens": [[1, 2]]} | inputs)
    assert bundle.run({"tokens": [[0, 511]], "mask": [[1, 1]], "max_tokens": 20})["lengths"] <= 20


def test_prompts_may_be_padded_on_the_left(stories):
    """As transformers pads batches of prompts."""
    bundle = Bundle.open(stories[1])
    plain = bundle.run({"tokens": [[1, 403, 407, 261]], "max_tokens": 6})["tokens"]
    padded_left = bundle.run({"tokens": [[0, 0, 1, 403, 407, 261]], "mask": [[0, 0, 1, 1, 1, 1]], "max_tokens": 6})["tokens"]
    np.testing.assert_array_equal(padded_left, plain)


def test_temperatures_near_zero_are_greedy(stories):
    bundle = Bundle.open(stories[1])
    call = {"text": ["Once upon a time"], "max_tokens": 8}
    greedy = bundle.run(call)["text"]
    for heat in (1e-4, 1e-6, 1e-9, 1e-12, 1e-30, 1e-38, 1e-40):
        assert bundle.run(call | {"temperature": np.asarray([heat], np.float32)})["text"] == greedy, heat


@pytest.mark.slow
def test_tokens_are_drawn_from_the_softmax(stories):
    """The frequencies of the likeliest tokens, over 4096 rows, within five standard deviations."""
    lm, path = stories
    rows, heat = 4096, 1.3
    ids = lm.encode("Once upon a time")
    tokens = np.tile(np.asarray(ids, np.int32), (rows, 1))
    sampled = Bundle.open(path).run({"tokens": tokens, "temperature": np.full(rows, heat, np.float32), "max_tokens": 1})["tokens"][:, 0]
    logits = lm.logits([ids])[0, -1].astype(np.float64) / heat
    share = np.exp(logits - logits.max())
    share /= share.sum()
    for token in np.argsort(-share)[:5]:
        deviation = np.sqrt(rows * share[token] * (1 - share[token]))
        assert abs((sampled == token).sum() - rows * share[token]) < 5 * deviation + 1


def test_signatures_that_a_model_lacks_are_refused(tmp_path):
    encoder, decoder = model_of("bert-plain"), model_of("llama-plain")
    for name in ("logits", "generate"):
        with pytest.raises(BadInput, match="is an encoder"):
            export_model(encoder, tmp_path / "b", signature=name)
    with pytest.raises(BadInput, match="is not an encoder"):
        export_model(decoder, tmp_path / "b", signature="embed")
    with pytest.raises(UnknownName, match="unknown signature `logit`"):
        export_model(decoder, tmp_path / "b", signature="logit")
    with pytest.raises(BadInput, match="together more than the model's context"):
        export_model(decoder, tmp_path / "b", signature="generate", length=decoder.config.context)
    with pytest.raises(BadInput, match="length = 99999 is more than"):
        export_model(decoder, tmp_path / "b", length=99999)
    with pytest.raises(BadInput, match="batch = 0"):
        export_model(decoder, tmp_path / "b", batch=0)
    with pytest.raises(BadInput, match="platform `gpu`"):
        export_model(decoder, tmp_path / "b", platforms=["gpu"])
    with pytest.raises(BadInput, match=r"argosy\.load"):
        decoder.export(tmp_path / "b")
    assert not list(tmp_path.iterdir()), "nothing is left behind"
