"""Signatures of language models and encoders: what their programs take, compute and give.

    logits     tokens [batch, length] -> logits [batch, length, V]
    embed      tokens, or texts -> embedding [batch, D], pooled and scaled as the model's folder says
    generate   prompts -> tokens [batch, N] and text (`export.generate`)

A row may be shorter than the others: `mask` is 1 for its tokens and 0 for what follows.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from argosy.core.errors import BadInput, UnknownName
from argosy.export.generate import generated
from argosy.export.manifest import BundleSignature, TensorSignature
from argosy.export.steps import DetokenizeStep, NormalizeStep, TokenizeStep
from argosy.infer.embed import EmbeddingSteps, frame_tokens, pool_tokens, read_steps
from argosy.infer.lm import LM
from argosy.models.parts.weight import Leaves, merge, split

BATCH, LENGTH = "batch", "length"
# Of a program that generates, unless they are set.
PROMPT_TOKENS, NEW_TOKENS = 128, 64

# (model, inputs by name) -> outputs by name.
ModelFunction = Callable[[Any, Mapping[str, Any]], dict[str, Any]]


class ModelSignature(NamedTuple):
    """A signature, and what it computes.

    function: of a model and its inputs.
    fixed: sizes of named axes that cannot be left open.
    """

    signature: BundleSignature
    function: ModelFunction
    fixed: dict[str, int]


def tokens_and_mask(context: int) -> list[TensorSignature]:
    """The inputs of a signature that reads sequences."""
    of = {"shape": [BATCH, LENGTH], "dtype": "int32"}
    return [
        TensorSignature(name="tokens", **of, description=f"token ids, at most {context} in a row"),
        TensorSignature(name="mask", **of, description="1 for tokens, 0 for what follows the last of a row", default=1),
    ]


def logits_signature(lm: LM) -> ModelSignature:
    """Logits at every token.

    Raises:
        BadInput: the model predicts no tokens.
    """
    lm.check_predicts()
    output = TensorSignature(name="logits", shape=[BATCH, LENGTH, lm.config.vocab], dtype="float32", description="of the next token")

    def logits(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {"logits": model(inputs["tokens"], model.config.attend(inputs["mask"]))[0]}

    signature = BundleSignature(
        description="logits of the token after each token",
        inputs=tokens_and_mask(lm.config.context),
        outputs=[output],
        programs=[],
        weights=[],
        padding=[BATCH, LENGTH],
        limits={LENGTH: lm.config.context},
        preprocess=text_steps(lm),
        example={"tokens": [example_tokens(lm)]},
    )
    return ModelSignature(signature, logits, {})


def embed_signature(lm: LM) -> ModelSignature:
    """One vector for each text.

    Raises:
        BadInput: the model is not an encoder, or its folder asks for a step that is not built.
    """
    if lm.config.causal:
        raise BadInput("this model predicts tokens and is not an encoder", hint="signature=logits, or signature=generate")
    steps = EmbeddingSteps() if lm.companions is None else read_steps(lm.companions)
    longest = min(steps.tokens or lm.config.context, lm.config.context)

    def embedding(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
        attend = model.config.attend(inputs["mask"])
        hidden = model.hidden(inputs["tokens"], attend)[0].astype(jnp.float32)
        return {"embedding": pool_tokens(hidden, attend.live, steps.pooling)}

    texts = []
    if lm.tokenizer is not None:
        first, last = frame_tokens(lm)
        how: Any = {"prompt": steps.prompt, "lower": steps.lower, "strip": True, "cut": True}
        texts = [TokenizeStep(first=[first], last=[last], **how)]
    about = f"{steps.pooling} of the tokens"
    vector = TensorSignature(name="embedding", shape=[BATCH, lm.config.width], dtype="float32", description=about)
    signature = BundleSignature(
        description="one vector for each text",
        inputs=tokens_and_mask(longest),
        outputs=[vector],
        programs=[],
        weights=[],
        padding=[BATCH, LENGTH],
        limits={LENGTH: longest},
        preprocess=texts,
        postprocess=[NormalizeStep()] if steps.normalize else [],
        example={"text": ["a boat"]} if texts else {"tokens": [example_tokens(lm)]},
    )
    return ModelSignature(signature, embedding, {})


def generate_signature(lm: LM, prompt_tokens: int | None = None, max_tokens: int | None = None) -> ModelSignature:
    """The whole completion of each prompt.

    Args:
        prompt_tokens: the longest prompt.
        max_tokens: the most tokens of a completion.

    Raises:
        BadInput: the model predicts no tokens, or its context has no room for both.
    """
    lm.check_predicts()
    context = lm.config.context
    new = max_tokens or min(NEW_TOKENS, max(context // 2, 1))
    prompt = prompt_tokens or min(PROMPT_TOKENS, context - new)
    if prompt < 1 or prompt + new > context:
        raise BadInput(f"length = {prompt} and max_tokens = {new}: together more than the model's context of {context}")
    stops = tuple(sorted(stop for stop in lm.stops() if stop < lm.config.vocab))

    def generate(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
        tokens, lengths = generated(model, **inputs, room=new, stops=stops)
        return {"tokens": tokens, "lengths": lengths}

    one: dict[str, Any] = {"name": "max_tokens", "shape": [], "dtype": "int32", "default": new}
    inputs = [
        *tokens_and_mask(prompt),
        TensorSignature(name="temperature", shape=[BATCH], dtype="float32", default=0.0, description="0: the likeliest token"),
        TensorSignature(name="seed", shape=[], dtype="uint32", default=0, description="of the random numbers above temperature 0"),
        TensorSignature(**one, description=f"the most tokens of a completion, at most {new}"),
    ]
    outputs = [
        TensorSignature(name="tokens", shape=[BATCH, new], dtype="int32", description="of the completions"),
        TensorSignature(name="lengths", shape=[BATCH], dtype="int32", description="how many there are of each row"),
    ]
    signature = BundleSignature(
        description=f"completions of at most {new} tokens",
        inputs=inputs,
        outputs=outputs,
        programs=[],
        weights=[],
        padding=[BATCH, LENGTH],
        limits={LENGTH: prompt},
        preprocess=text_steps(lm),
        postprocess=[DetokenizeStep()] if lm.tokenizer is not None else [],
        example={"tokens": [example_tokens(lm)[:prompt]]},
    )
    return ModelSignature(signature, generate, {LENGTH: prompt})


def text_steps(lm: LM) -> list[TokenizeStep]:
    """How a decoder reads text."""
    if lm.tokenizer is None:
        return []
    return [TokenizeStep(first=[lm.tokenizer.bos] if lm.tokenizer.adds_bos else [])]


def example_tokens(lm: LM) -> list[int]:
    """A few ids of the vocabulary."""
    return (np.arange(1, 9) % lm.config.vocab).tolist()


SIGNATURES: dict[str, Callable[..., ModelSignature]] = {
    "logits": logits_signature,
    "embed": embed_signature,
    "generate": generate_signature,
}


def model_signature(lm: LM, name: str, **sizes: Any) -> ModelSignature:
    """A signature of a model by name.

    Raises:
        UnknownName: there is none of this name.
        BadInput: the model has no such signature.
    """
    if name not in SIGNATURES:
        raise UnknownName("signature", name, SIGNATURES)
    return SIGNATURES[name](lm, **sizes)


def split_program(module: Any, function: ModelFunction) -> tuple[Callable[..., Any], Leaves]:
    """A function of (weights, inputs), and the weights of the module."""
    graph, weights = split(module)
    dtype = module.dtype

    def program(weights: Leaves, inputs: Mapping[str, Any]) -> dict[str, Any]:
        model = merge(graph, weights)
        model.dtype = dtype
        return function(model, inputs)

    return program, weights
