"""The state that all routes share: the model, its engine's thread and the limits. Also the checks of requests that generate text."""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from argosy.core.counts import plural
from argosy.core.errors import ArgosyError
from argosy.data.chat.omissions import Omitted
from argosy.data.chat.template import choose_template
from argosy.infer.cpu.panels import count_in_blocks
from argosy.infer.engine.request import Request
from argosy.infer.lm import LM
from argosy.infer.placement import weights_mesh
from argosy.infer.tools.grammar import Grammar, TooManyGrammars
from argosy.infer.tools.notations import template_notation
from argosy.observe.readable import format_bytes
from argosy.ops.native import library
from argosy.parallel.unsplit import unsplit_weights
from argosy.serve.engine.admission import Admission
from argosy.serve.engine.front import Front
from argosy.serve.engine.replicas import ReplicaFront
from argosy.serve.openai.fields import GenerationFields, RenderFields
from argosy.serve.openai.response_store import ResponseStore
from argosy.serve.openai.structured import StructureRequest, grammar_error
from argosy.serve.response.choice import CompletionChoice, StopConditions
from argosy.serve.response.reasoning import thinking_variables
from argosy.serve.sampling import read_sampling
from argosy.serve.settings import Parser, ServerLimits
from argosy.web.errors import ApiError, input_error, service_unavailable, shorten_for_echo, unknown_model

MANY = "context_length_exceeded"
# The version of the weights before an update names one, as in vLLM.
UNNAMED = "default"


F = TypeVar("F", bound=Admission[Any, Any])


@dataclass
class ServedModel(Generic[F]):
    """A served model of any kind.

    lm: the model.
    name: its name in the API.
    front: admits requests to the thread that computes.
    limits: the limits on requests.
    request_templates: whether requests may bring their own chat template.
    created: when it was loaded, in seconds since 1970.
    """

    lm: LM
    name: str
    front: F
    limits: ServerLimits
    request_templates: bool = field(default=False, kw_only=True)
    created: int = field(default_factory=lambda: int(time.time()), kw_only=True)

    @property
    def context(self) -> int:
        """The most tokens of a sequence."""
        raise NotImplementedError

    @property
    def about(self) -> list[str]:
        """Lines to print when the server starts."""
        raise NotImplementedError

    def tokenized(self, text: str, special: bool) -> list[int]:
        """Returns the token ids of a text, for /tokenize.

        Args:
            special: whether to add the special tokens that the model expects around a text.
        """
        raise NotImplementedError

    def check_model(self, name: str | None) -> None:
        """Checks the field `model` of a request.

        Raises:
            ApiError: this server has no model or adapter of this name.
        """
        if name is not None and name not in self.names:
            raise unknown_model(name, self.name)

    @property
    def names(self) -> list[str]:
        """The names that a request may give as `model`: the model's own, then those of its adapters."""
        return [self.name]

    def template(self, tools: list[dict[str, Any]] | None, requested: str | None) -> str:
        """The chat template that renders a request.

        Args:
            requested: the template that came with the request, if any.

        Raises:
            ApiError: the model has no template, or one came with the request and this server accepts none.
        """
        if requested is not None:
            if not self.request_templates:
                problem = "this server accepts no `chat_template` from requests (its setting `request_chat_template` allows them)"
                raise ApiError(problem, param="chat_template", code="unsupported_parameter")
            return requested
        try:
            return choose_template(getattr(self.lm.tokenizer, "chat_templates", None) or {}, tools=bool(tools))
        except ArgosyError as error:
            raise input_error(error, "messages") from None

    def chat_prompt(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, fields: RenderFields
    ) -> list[int]:
        """Renders a conversation, and returns its token ids. Slow, because templates are rendered in a separate process.

        Args:
            messages: chat messages as templates read them.
            tools: the tools to pass to the template.
            fields: the request's options for rendering.

        Raises:
            ApiError: there is no template, it refuses these messages, or it came with the request and this server accepts none.
        """
        template = self.template(tools, fields.chat_template)
        if (notation := template_notation(template)) is not None:
            messages, tools = notation.messages(messages, template), notation.described(tools)
        if unread := sorted(name for name in fields.chat_template_kwargs if name not in template):
            problem = f"the chat template of this model does not read `{shorten_for_echo(unread[0])}`"
            raise ApiError(problem, param="chat_template_kwargs", code="unsupported_parameter")
        variables: dict[str, Any] = thinking_variables(fields.reasoning_effort, template) | fields.chat_template_kwargs
        variables |= {"documents": fields.documents} if fields.documents else {}
        options: Any = {
            "template": template, "add_generation_prompt": fields.add_generation_prompt,
            "continue_final_message": fields.continue_final_message,
            "add_special_tokens": bool(fields.add_special_tokens),
        }  # fmt: skip
        try:
            return self.lm.chat_prompt(messages, tools=tools, **options, **variables)
        except Omitted as error:
            raise ApiError(error.what, param=error.param, code="unsupported_parameter") from None
        except ArgosyError as error:
            raise input_error(error, "messages") from None


@dataclass
class Service(ServedModel[Front | ReplicaFront]):
    """A model that generates text.

    defaults: sampling settings for fields that a request does not give.
    seeds: the generator of seeds for requests that give none.
    reasoning: the parser that splits reasoning off completions.
    marks: special tokens that divide a completion into channels, each with the character that it is decoded to (`channel_marks`).
    store: keeps responses of /v1/responses; None: nothing is kept.
    weight_version: the version of the weights, as an update over HTTP named it.
    """

    defaults: dict[str, Any]
    seeds: random.Random
    reasoning: Parser = field(default="auto", kw_only=True)
    marks: Mapping[int, str] = field(default_factory=dict, kw_only=True)
    store: ResponseStore | None = field(default=None, kw_only=True)
    weight_version: str = field(default=UNNAMED, kw_only=True)

    @property
    def context(self) -> int:
        """The most tokens of a sequence, prompt and completion."""
        return self.front.engine.context

    @property
    def about(self) -> list[str]:
        defaults = " ".join(f"{key}={value}" for key, value in self.defaults.items())
        sampled = f"{self.name}: requests that say nothing are sampled with {defaults}"
        lines = [sampled, f"cache: {self.front.described()}"]
        weights = self.front.engine.weights()
        count, size = count_in_blocks(weights)
        if count:
            lines.insert(1, f"weights: the codes of {plural(count, 'weight')} are multiplied as they are: {format_bytes(size)}")
        if (mesh := weights_mesh(weights)) is not None and (whole := unsplit_weights(mesh, weights)):
            lines.append(f"whole: {whole}")
        if why := library.failure():
            lines.append(f"no compiled kernels: {why}; several requests at a time take up to twice as long")
        return lines

    @property
    def names(self) -> list[str]:
        adapters = self.front.engine.adapters
        return [self.name, *(() if adapters is None else adapters.loaded)]

    def adapter_of(self, name: str | None) -> str | None:
        """The name of the adapter that a request's `model` names; None: the model alone."""
        return None if name in (None, self.name) else name

    def tokenized(self, text: str, special: bool) -> list[int]:
        if text:
            return self.encode(text, special)
        return self.lm.encode("") if special and self.lm.tokenizer else []

    def check(self, fields: GenerationFields) -> None:
        """Checks a request against the limits.

        Raises:
            ApiError: the request names another model, or exceeds a limit.
        """
        self.check_model(fields.model)
        limits = self.limits
        if (fields.top or 0) > limits.logprobs:
            raise ApiError(f"`{fields.top_name}` is {fields.top}, at most {limits.logprobs}", param=fields.top_name)
        if (fields.prompt_logprobs or 0) > limits.logprobs:
            problem = f"`prompt_logprobs` is {fields.prompt_logprobs}, at most {limits.logprobs}"
            raise ApiError(problem, param="prompt_logprobs")
        if len(fields.stop) + len(fields.stop_token_ids) > limits.stops:
            raise ApiError(f"more than {limits.stops} stop strings and stop tokens", param="stop")
        if any(not 0 < len(stop) <= limits.stop_length for stop in fields.stop):
            raise ApiError(f"a stop string has 1 to {limits.stop_length} characters", param="stop")
        if fields.stop and self.lm.tokenizer is None:
            raise ApiError("stop strings need a tokenizer, and the model has none", param="stop")

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """The token ids of a prompt. An empty prompt becomes one token: the beginning-of-sequence or end-of-sequence token, or 0.

        Args:
            bos: whether to put the beginning-of-sequence token in front, if the tokenizer adds one.

        Raises:
            ApiError: the model has no tokenizer, or the text cannot fit into the context.
        """
        tokenizer = self.lm.tokenizer
        if tokenizer is None:
            raise ApiError("the model has no tokenizer: give token ids", param="prompt")
        # Tokens have at most `LONGEST_TOKEN` characters, so a longer text cannot fit, and is not encoded.
        if len(text) > self.context * LONGEST_TOKEN:
            raise ApiError(f"the prompt is longer than the context of {self.context} tokens", param="prompt", code=MANY)
        ids = self.lm.encode(text) if bos else tokenizer.encode(text)
        if not ids:
            ids = [next(token for token in (tokenizer.bos, tokenizer.eos, 0) if token is not None)]
        return ids

    def requests(self, fields: GenerationFields, prompts: Sequence[list[int]], most: int | None) -> list[Request]:
        """Makes `n` engine requests for each prompt.

        Args:
            prompts: the token ids of each prompt.
            most: the most tokens of a completion; None: as many as fit into the context; 0: no requests are made.

        Raises:
            ApiError: a sampling setting is invalid, or prompt and completion do not fit into the context or the limits.
        """
        if len(prompts) * fields.n > self.limits.answers:
            problem = f"{plural(len(prompts), 'prompt')} times n={fields.n} is more than {plural(self.limits.answers, 'answer')}"
            raise ApiError(problem, param="n" if fields.n > 1 else "prompt")
        least, longest = 1 if most is None else most, self.front.prompts.longest
        for ids in prompts:
            if len(ids) + least > self.context:
                requested = f"{plural(len(ids), 'token')} of prompt and {most or f'at least {least}'} of answer"
                raise ApiError(f"{requested} are more than the context of {self.context}", code=MANY)
            if fields.scoring is not None and len(ids) > longest:
                count = plural(len(ids), "token")
                problem = f"log-probabilities of a prompt of {count}, this server computes those of at most {longest}"
                raise ApiError(problem, param=fields.scoring)
            if wrong := [token for token in ids if not 0 <= token < self.lm.config.vocab]:
                problem = f"token id {wrong[0]} is outside the model's vocabulary of {self.lm.config.vocab}"
                raise ApiError(problem, param="prompt")
        sampling = read_sampling(fields, self.defaults, self.lm.tokenizer)
        adapter = self.adapter_of(fields.model)
        ends = self.ends(fields)
        repetition = fields.repetition_detection
        options: Any = {"salt": fields.cache_salt or "", "adapter": adapter, "repetition": repetition and repetition.settings}
        top = fields.top or 0
        requests = []
        for ids in prompts if most != 0 else ():
            # With a given seed, a completion does not depend on the index of its prompt in the request.
            seed = self.seeds.getrandbits(63) if fields.seed is None else fields.seed
            requests += [
                Request(ids, most or self.context - len(ids), sampling, ends, seed, k, top, **options) for k in range(fields.n)
            ]
        return requests

    def ends(self, fields: GenerationFields) -> frozenset[int]:
        """The token ids that end a completion."""
        return frozenset(fields.stop_token_ids) | (frozenset() if fields.ignore_eos else frozenset(self.lm.stops()))

    def choice(
        self, fields: GenerationFields, prompt: Sequence[int], *, begun: bool = False, marks: Mapping[int, str] | None = None
    ) -> CompletionChoice:
        """Returns an empty completion of a prompt, to which events are added.

        Args:
            begun: whether the first token keeps its leading space whatever the prompt is, as grammars assume.
            marks: texts that some special tokens are decoded to; other special tokens are decoded to nothing.
        """
        tokenizer = self.lm.tokenizer
        ending = StopConditions(
            stops=fields.stop,
            stop_tokens=frozenset(fields.stop_token_ids),
            eos=None if tokenizer is None or fields.ignore_eos else tokenizer.eos,
            least=fields.min_tokens or 0,
            include=fields.include_stop_str_in_output,
            skip_special=fields.skip_special_tokens,
            marks=marks or {},
        )
        return CompletionChoice(tokenizer, prompt, ending, begun=begun)

    def grammar(self, request: StructureRequest) -> Grammar:
        """Compiles the structure that a completion must match. Slow.

        Raises:
            ApiError: the structure is not supported, or compiling takes too long.
        """
        try:
            return self.lm.grammars().get(request.structure, seconds=self.limits.compile_seconds)
        except TooManyGrammars as error:
            raise service_unavailable(error.what, "grammar_queue_full") from None
        except ArgosyError as error:
            raise grammar_error(error, request.param) from None


# The most characters of a token. The longest tokens of published vocabularies have 128 spaces.
LONGEST_TOKEN = 512
