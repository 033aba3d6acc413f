"""The parts that all routes share: the model, its engine thread, the limits; and the checks of requests that generate text."""

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
# The version of weights that no update has named. vLLM's.
UNNAMED = "default"


F = TypeVar("F", bound=Admission[Any, Any])


@dataclass
class ServedModel(Generic[F]):
    """A served model of any kind.

    name: its name in the API.
    request_templates: requests may bring their own chat template.
    """

    lm: LM
    name: str
    front: F
    limits: ServerLimits
    request_templates: bool = field(default=False, kw_only=True)
    created: int = field(default_factory=lambda: int(time.time()), kw_only=True)

    @property
    def context(self) -> int:
        """The longest sequence in tokens."""
        raise NotImplementedError

    @property
    def about(self) -> list[str]:
        """Lines to print when the server starts."""
        raise NotImplementedError

    def tokenized(self, text: str, special: bool) -> list[int]:
        """Token ids of a text, for /tokenize.

        Args:
            special: add the special tokens that the model expects around it.
        """
        raise NotImplementedError

    def check_model(self, name: str | None) -> None:
        """Checks the `model` of a request.

        Raises:
            ApiError: this server has another model.
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
            ApiError: there is none, or it came with the request and this server accepts none.
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
        """Token ids of a rendered conversation. Slow: templates are rendered in a separate process.

        Args:
            tools: passed to the template.

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

    defaults: sampling settings where a request gives none.
    seeds: source of random seeds where a request gives none.
    reasoning: how thoughts are split off answers.
    marks: special tokens that split them, as from `channels.marks_of`.
    store: keeps responses of /v1/responses; None: nothing is kept.
    weight_version: version of the weights, as an update over HTTP named it.
    """

    defaults: dict[str, Any]
    seeds: random.Random
    reasoning: Parser = field(default="auto", kw_only=True)
    marks: Mapping[int, str] = field(default_factory=dict, kw_only=True)
    store: ResponseStore | None = field(default=None, kw_only=True)
    weight_version: str = field(default=UNNAMED, kw_only=True)

    @property
    def context(self) -> int:
        """The longest sequence in tokens, prompt and answer."""
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
        """The adapter that a request's `model` names; None: the model alone."""
        return None if name in (None, self.name) else name

    def tokenized(self, text: str, special: bool) -> list[int]:
        if text:
            return self.encode(text, special)
        return self.lm.encode("") if special and self.lm.tokenizer else []

    def check(self, fields: GenerationFields) -> None:
        """Checks a request against the limits.

        Raises:
            ApiError: another model, or more than the limits allow.
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
        """The token ids of a prompt. An empty one begins with the model's first token."""
        tokenizer = self.lm.tokenizer
        if tokenizer is None:
            raise ApiError("the model has no tokenizer: give token ids", param="prompt")
        # No token is longer than this many characters, so a text that is cannot fit, and is not encoded.
        if len(text) > self.context * LONGEST_TOKEN:
            raise ApiError(f"the prompt is longer than the context of {self.context} tokens", param="prompt", code=MANY)
        ids = self.lm.encode(text) if bos else tokenizer.encode(text)
        if not ids:
            ids = [next(token for token in (tokenizer.bos, tokenizer.eos, 0) if token is not None)]
        return ids

    def requests(self, fields: GenerationFields, prompts: Sequence[list[int]], most: int | None) -> list[Request]:
        """`n` requests of the engine for each prompt.

        Args:
            most: limit on the tokens of an answer; None: up to the context; 0: no requests.

        Raises:
            ApiError: the sampler does not support what is asked, or prompt and answer do not fit into the context.
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
            # One seed gives one answer, wherever its prompt stands in the request.
            seed = self.seeds.getrandbits(63) if fields.seed is None else fields.seed
            requests += [
                Request(ids, most or self.context - len(ids), sampling, ends, seed, k, top, **options) for k in range(fields.n)
            ]
        return requests

    def ends(self, fields: GenerationFields) -> frozenset[int]:
        """The token ids that end an answer."""
        return frozenset(fields.stop_token_ids) | (frozenset() if fields.ignore_eos else frozenset(self.lm.stops()))

    def choice(
        self, fields: GenerationFields, prompt: Sequence[int], *, begun: bool = False, marks: Mapping[int, str] | None = None
    ) -> CompletionChoice:
        """An empty answer to a prompt.

        Args:
            begun: its first token keeps its leading space whatever the prompt is, as a grammar takes it.
            marks: texts of some special tokens, in place of nothing.
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
        """Compiles what an answer must match. Slow.

        Raises:
            ApiError: it is not supported, or takes too long.
        """
        try:
            return self.lm.grammars().get(request.structure, seconds=self.limits.compile_seconds)
        except TooManyGrammars as error:
            raise service_unavailable(error.what, "grammar_queue_full") from None
        except ArgosyError as error:
            raise grammar_error(error, request.param) from None


# Characters of the longest tokens of published vocabularies: 128 spaces, and some margin.
LONGEST_TOKEN = 512
