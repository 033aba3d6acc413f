"""Signatures of language models, encoders and rankers: the inputs, computation and outputs of their programs.

    logits     tokens [batch, length] -> logits [batch, length, V]
    classify   tokens, or texts, or pairs of texts -> scores [batch, Z], probabilities and the name of the likeliest class
    embed      tokens, or texts -> embedding [batch, D], pooled and scaled according to the model's folder
    rank       numbers, categories -> scores, and probabilities of clicks
    user, item   ids -> embedding, for models with two towers
    generate   prompts -> tokens [batch, N] and text (`export.generate`)

Rows may differ in length: `mask` is 1 for tokens and 0 for padding.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from argosy.core.errors import BadInput, UnknownName
from argosy.data.framing import frame_of
from argosy.export.generate import generate_tokens
from argosy.export.manifest import BundleSignature, TensorSignature
from argosy.export.steps import (
    DetokenizeStep,
    InputStep,
    LabelsStep,
    NormalizeStep,
    ProbabilitiesStep,
    TokenizePairsStep,
    TokenizeStep,
)
from argosy.infer.embed import check_embeds, embedding_steps, frame_tokens
from argosy.infer.lm import LM
from argosy.models.parts.texts import text_scores, text_vectors
from argosy.models.parts.weight import Leaves, merge, split

BATCH, LENGTH, PROMPT_LENGTH = "batch", "length", "prompt_length"
# The default limits of prompts and completions of `generate`, in tokens.
PROMPT_TOKENS, NEW_TOKENS = 128, 64

# (model, inputs by name) -> outputs by name.
ModelFunction = Callable[[Any, Mapping[str, Any]], dict[str, Any]]


class ModelSignature(NamedTuple):
    """A signature and its computation.

    function: the computation (model, inputs) -> outputs.
    fixed: the sizes of named axes that cannot be left open.
    """

    signature: BundleSignature
    function: ModelFunction
    fixed: dict[str, int]


def tokens_and_mask(context: int, vocab: int) -> list[TensorSignature]:
    """Returns the inputs of a signature that reads token sequences.

    Args:
        context: the most tokens of a sequence.
        vocab: the size of the vocabulary.
    """
    of = {"shape": [BATCH, LENGTH], "dtype": "int32"}
    return [
        TensorSignature(name="tokens", **of, description=f"token ids, at most {context} in a row", minimum=0, maximum=vocab - 1),
        TensorSignature(
            name="mask", **of, description="1 for tokens, 0 for what follows the last of a row", default=1, minimum=0, maximum=1
        ),
    ]


def logits_signature(lm: LM) -> ModelSignature:
    """Returns the signature `logits`: the logits at every token.

    Raises:
        BadInput: the model does not predict tokens.
    """
    lm.check_predicts()
    output = TensorSignature(name="logits", shape=[BATCH, LENGTH, lm.config.vocab], dtype="float32", description="of the next token")

    def logits(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {"logits": model(inputs["tokens"], model.config.attend(inputs["mask"]))[0]}

    signature = BundleSignature(
        description="logits of the token after each token",
        inputs=tokens_and_mask(lm.config.context, lm.config.vocab),
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
    """Returns the signature `embed`: one vector for each text.

    Raises:
        BadInput: the model does not embed texts, or its folder needs an unsupported step of sentence-transformers.
    """
    _check_reads_texts(lm)
    check_embeds(lm)
    steps = embedding_steps(lm)
    longest = min(steps.tokens or lm.config.context, lm.config.context)

    def embedding(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
        after = None if steps.include_prompt else inputs[PROMPT_LENGTH][:, None]
        return {"embedding": text_vectors(model, inputs["tokens"], inputs["mask"], steps.pooling, after=after)[0][:, 0]}

    texts: list[InputStep] = []
    if lm.tokenizer is not None:
        first, last = frame_tokens(lm)
        step_fields: Any = {"prompt": steps.prompt, "prompts": dict(steps.prompts), "lower": steps.lower, "cut": True}
        step_fields |= {"strip": True}
        step_fields |= {} if steps.include_prompt else {"prompt_length": PROMPT_LENGTH}
        texts = [TokenizeStep(first=first, last=last, **step_fields)]
    about = f"{steps.pooling} of the tokens"
    inputs = tokens_and_mask(longest, lm.config.vocab)
    if not steps.include_prompt:
        tensor_fields: dict[str, Any] = {"dtype": "int32", "default": 0, "minimum": 0, "maximum": longest}
        about_length = "tokens of each row that are not pooled"
        inputs.append(TensorSignature(name=PROMPT_LENGTH, shape=[BATCH], description=about_length, **tensor_fields))
    vector = TensorSignature(name="embedding", shape=[BATCH, lm.config.embedding_width], dtype="float32", description=about)
    signature = BundleSignature(
        description="one vector for each text",
        inputs=inputs,
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


def classify_signature(lm: LM) -> ModelSignature:
    """Returns the signature `classify`: the scores of a text or a pair of texts, with probabilities and class names.

    Raises:
        BadInput: the model has no head of scores.
    """
    config = lm.config
    if not config.scored:
        hint = "`argosy train classify model=FOLDER data.source=FILE.jsonl` trains one"
        raise BadInput("this model has no head of scores", hint=hint)
    tells_apart = not config.causal and config.types > 1

    def classify(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
        scores = text_scores(model, inputs["tokens"], inputs["mask"], inputs.get("types"))[0][:, 0]
        return {"scores": scores.astype(jnp.float32)}

    inputs = tokens_and_mask(config.context, config.vocab)
    if tells_apart:
        about = "1 for tokens of the second text of a pair"
        of: dict[str, Any] = {"shape": [BATCH, LENGTH], "dtype": "int32", "default": 0, "minimum": 0, "maximum": config.types - 1}
        inputs.append(TensorSignature(name="types", **of, description=about))
    texts: list[Any] = []
    if lm.tokenizer is not None:
        first, between, last = map(list, frame_of(lm.tokenizer))
        texts = [TokenizePairsStep(first=first, between=between, last=last, cut=True, types="types" if tells_apart else "")]
    names = list(config.label_names)
    after: list[Any] = []
    if config.activation_of_scores != "none":
        after.append(ProbabilitiesStep(step=config.activation_of_scores, names=names if config.scored > 1 else []))
    if config.activation_of_scores == "softmax":
        after.append(LabelsStep(names=names))
    names_text = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    output = TensorSignature(name="scores", shape=[BATCH, config.scored], dtype="float32", description=f"of {names_text}")
    signature = BundleSignature(
        description="the class of each text" if config.scored > 1 else "the score of each text",
        inputs=inputs,
        outputs=[output],
        programs=[],
        weights=[],
        padding=[BATCH, LENGTH],
        limits={LENGTH: config.context},
        preprocess=texts,
        postprocess=after,
        example={"text": ["a boat"]} if texts else {"tokens": [example_tokens(lm)]},
    )
    return ModelSignature(signature, classify, {})


def rank_signature(lm: LM) -> ModelSignature:
    """Returns the signature `rank`: the score of each pair of user and item, and its probability if scores are logits of clicks.

    Raises:
        BadInput: the model does not read numbers and categories.
    """
    _check_ranks(lm)

    def rank(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {"scores": model(inputs["numbers"], inputs["categories"])}

    tables, retrieves = lm.config.id_spaces, hasattr(lm.module, "items")
    about = f"ids below {', '.join(map(str, tables))}"
    limits: dict[str, Any] = {"minimum": 0, "maximum": [size - 1 for size in tables]}
    categories = TensorSignature(name="categories", shape=[BATCH, len(tables)], dtype="int32", description=about, **limits)
    output = TensorSignature(name="scores", shape=[BATCH], dtype="float32", description="cosines" if retrieves else "logits of clicks")
    signature = BundleSignature(
        description="the score of each user and item",
        inputs=[_numbers(lm), categories],
        outputs=[output],
        programs=[],
        weights=[],
        padding=[BATCH],
        postprocess=[] if retrieves else [ProbabilitiesStep(step="sigmoid")],
        example={"numbers": [[0.0] * lm.config.numbers], "categories": [[0] * len(tables)]},
    )
    return ModelSignature(signature, rank, {})


def user_signature(lm: LM) -> ModelSignature:
    """Returns the signature `user`: the embedding of each user."""
    _check_ranks(lm, "users")
    ids = _ids("users", lm.config.users)
    example = {"numbers": [[0.0] * lm.config.numbers], "users": [0]}
    return _tower(lm, [_numbers(lm), ids], example, lambda model, inputs: model.users(inputs["numbers"], inputs["users"]))


def item_signature(lm: LM) -> ModelSignature:
    """Returns the signature `item`: the embedding of each item."""
    _check_ranks(lm, "items")
    ids = _ids("items", lm.config.items)
    return _tower(lm, [ids], {"items": [0]}, lambda model, inputs: model.items(inputs["items"]))


def _ids(name: str, count: int) -> TensorSignature:
    about = f"ids below {count}"
    return TensorSignature(name=name, shape=[BATCH], dtype="int32", description=about, minimum=0, maximum=count - 1)


def _numbers(lm: LM) -> TensorSignature:
    return TensorSignature(name="numbers", shape=[BATCH, lm.config.numbers], dtype="float32", description="numerical features")


def _tower(
    lm: LM, inputs: list[TensorSignature], example: dict[str, Any], vectors: Callable[[Any, Mapping[str, Any]], Any]
) -> ModelSignature:
    """Returns a signature with one vector for each row."""
    output = TensorSignature(name="embedding", shape=[BATCH, lm.config.output], dtype="float32", description="at length 1")
    fields: Any = {"inputs": inputs, "outputs": [output], "programs": [], "weights": [], "padding": [BATCH], "example": example}
    signature = BundleSignature(description="one vector for each row", **fields)
    return ModelSignature(signature, lambda model, inputs: {"embedding": vectors(model, inputs).astype(jnp.float32)}, {})


def _check_ranks(lm: LM, tower: str | None = None) -> None:
    """Checks that a model reads numbers and categories, and has a tower of this name.

    Raises:
        BadInput: the model does not.
    """
    if lm.config.inputs != "clicks":
        raise BadInput("this model reads texts: it ranks no users and items", hint="signature=logits, embed, classify or generate")
    if tower is not None and not hasattr(lm.module, tower):
        raise BadInput(f"this ranker has no tower of {tower}", hint="signature=rank; `argosy train two-tower` trains towers")


def _check_reads_texts(lm: LM) -> None:
    if lm.config.inputs == "clicks":
        raise BadInput("this model reads numbers and categories, not texts", hint="signature=rank")


def generate_signature(lm: LM, prompt_tokens: int | None = None, max_tokens: int | None = None) -> ModelSignature:
    """Returns the signature `generate`: the whole completion of each prompt.

    Args:
        prompt_tokens: the limit of a prompt in tokens.
        max_tokens: the limit of a completion in tokens.

    Raises:
        BadInput: the model does not predict tokens, or both limits together exceed its context.
    """
    lm.check_predicts()
    context = lm.config.context
    new = max_tokens or min(NEW_TOKENS, max(context // 2, 1))
    prompt = prompt_tokens or min(PROMPT_TOKENS, context - new)
    if prompt < 1 or prompt + new > context:
        raise BadInput(f"length = {prompt} and max_tokens = {new}: together more than the model's context of {context}")
    stops = tuple(sorted(stop for stop in lm.stops() if stop < lm.config.vocab))

    def generate(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
        tokens, lengths = generate_tokens(model, **inputs, room=new, stops=stops)
        return {"tokens": tokens, "lengths": lengths}

    tensor_fields: dict[str, Any] = {"name": "max_tokens", "shape": [], "dtype": "int32", "default": new, "minimum": 1, "maximum": new}
    inputs = [
        *tokens_and_mask(prompt, lm.config.vocab),
        TensorSignature(
            name="temperature", shape=[BATCH], dtype="float32", default=0.0, minimum=0.0, description="0: the likeliest token"
        ),
        TensorSignature(name="seed", shape=[], dtype="uint32", default=0, description="of the random numbers above temperature 0"),
        TensorSignature(**tensor_fields, description=f"the most tokens of a completion, at most {new}"),
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


def text_steps(lm: LM) -> list[InputStep]:
    """Returns the steps from text to the inputs of a decoder; none without a tokenizer."""
    if lm.tokenizer is None:
        return []
    return [TokenizeStep(first=[lm.tokenizer.bos] if lm.tokenizer.adds_bos else [])]


def example_tokens(lm: LM) -> list[int]:
    """Returns a few ids of the vocabulary, as an example."""
    return (np.arange(1, 9) % lm.config.vocab).tolist()


SIGNATURES: dict[str, Callable[..., ModelSignature]] = {
    "logits": logits_signature,
    "embed": embed_signature,
    "classify": classify_signature,
    "rank": rank_signature,
    "user": user_signature,
    "item": item_signature,
    "generate": generate_signature,
}


def model_signature(lm: LM, name: str, **sizes: Any) -> ModelSignature:
    """Returns a signature of a model by name.

    Args:
        sizes: further arguments of the function in `SIGNATURES`.

    Raises:
        UnknownName: there is no signature of this name.
        BadInput: the model does not have this signature.
    """
    if name not in SIGNATURES:
        raise UnknownName("signature", name, SIGNATURES)
    return SIGNATURES[name](lm, **sizes)


def split_program(module: Any, function: ModelFunction) -> tuple[Callable[..., Any], Leaves]:
    """Splits a module from its weights. Returns a function of (weights, inputs), and the weights."""
    graph, weights = split(module)
    dtype = module.dtype

    def program(weights: Leaves, inputs: Mapping[str, Any]) -> dict[str, Any]:
        model = merge(graph, weights)
        model.dtype = dtype
        return function(model, inputs)

    return program, weights
