"""The HTTP routes of a server for one model. Each reads a JSON body, runs slow work in other threads, and responds in JSON."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from argosy.data.chat.template import RENDERING
from argosy.infer.tools.grammar import COMPILING
from argosy.serve import playground
from argosy.serve.admin import Admin
from argosy.serve.anthropic import messages
from argosy.serve.engine.admission import engine_died_error, shutting_down
from argosy.serve.engine.encoder import EncoderFront, EncoderService
from argosy.serve.metrics import CONTENT_TYPE
from argosy.serve.openai import chat, completions, embeddings, responses
from argosy.serve.openai.fields import DetokenizeFields, TokenizeFields
from argosy.serve.openai.response_store import ResponseStore
from argosy.serve.response.choice import TokenNames
from argosy.serve.response.writer import GenerationJob
from argosy.serve.service import ServedModel, Service
from argosy.web.app import guarded_app
from argosy.web.body import read_json_body
from argosy.web.connection import while_connected
from argosy.web.errors import ApiError, Json
from argosy.web.pages import page_files


class App:
    """The ASGI application of a service.

    asgi: the application.
    watching: the routes that are on the admin port too: health, metrics and version.

    Args:
        key: the API key; None: requests need none.
        local: whether the server listens on the loopback only; see `Guard`.
        web: whether to serve the playground and the dashboard at `/`, for models that generate text.
        admin: the admin routes, if they are on this port too. They need their own key.
    """

    def __init__(
        self,
        service: Service | EncoderService,
        *,
        key: str | None = None,
        local: bool = False,
        web: bool = True,
        admin: Admin | None = None,
    ):
        self.service = service
        # Several threads, because rendering a template may take seconds.
        self._slow = ThreadPoolExecutor(RENDERING, "prepare")
        # Templates that come with requests have one thread of their own, so that slow ones cannot block other requests.
        self._foreign = ThreadPoolExecutor(1, "prepare with a template")
        # Grammars have their own threads, so that a schema that takes seconds to compile delays no request without one.
        self._compiling = ThreadPoolExecutor(2 * COMPILING, "compile")
        # One thread, because XLA compiles with several threads itself.
        self._compiling_prompts = ThreadPoolExecutor(1, "compile prompts")
        post, get = ["POST"], ["GET"]
        routes = [
            *self._answering(),
            Route("/v1/models", self.models, methods=get),
            Route("/v1/models/{name:path}", self.model, methods=get),
            Route("/tokenize", self._computing(tokenize), methods=post),
            Route("/tokenizer_info", self.tokenizer_info, methods=get),
            Route("/detokenize", self._computing(detokenize), methods=post),
            Route("/health", self.health, methods=get),
            Route("/ping", self.health, methods=["GET", "POST"]),
            Route("/load", self.load, methods=get),
            Route("/version", self.version, methods=get),
            Route("/metrics", self.metrics, methods=get),
        ]
        public = ()
        if web and isinstance(service, Service):
            routes += playground.playground_routes(service, key is not None)
            public = page_files(playground.FOLDER)
        apart: dict[str, str] = {}
        if admin is not None:
            assert admin.settings.key
            # Admin routes come before `/v1/models/{name}`, which matches any path.
            routes = [*admin.routes(), *routes]
            apart = {route.path: admin.settings.key for route in admin.routes()}
        self.asgi = guarded_app(routes, key=key, local=local, headers=service.limits.headers, public=public, apart=apart)
        # Routes for monitoring, which the admin port has too.
        self.watching = [route for route in routes if route.path in ("/health", "/metrics", "/version")]

    # ---------------------------------------------------------------- answers

    def _answering(self) -> list[Route]:
        """The routes that run the model. Routes for the other kind of model (encoder or generator) respond with 404 and the reason."""
        encodes = isinstance(self.service, EncoderService)
        routes = []
        for path, prepare in GENERATING.items():
            routes.append(Route(path, self._other_kind if encodes else self._generating(prepare), methods=["POST"]))
        for path, prepare in ENCODING.items():
            routes.append(Route(path, self._encoding(prepare) if encodes else self._other_kind, methods=["POST"]))
        if not encodes:
            routes.append(Route("/v1/messages/count_tokens", self._computing(messages.count_tokens), methods=["POST"]))
            routes.append(Route("/v1/responses/{name}", self.response, methods=["GET", "DELETE"]))
            routes.append(Route("/v1/responses/{name}/cancel", self.cancel, methods=["POST"]))
        return routes

    async def _other_kind(self, request: Request) -> Response:
        name = f"`{self.service.name}`"
        if isinstance(self.service, EncoderService):
            problem = f"{name} is an encoder and generates no text; it answers /v1/embeddings, /score and /rerank"
        else:
            problem = f"{name} generates text and is not an encoder; it answers {', '.join(GENERATING)}"
        raise ApiError(problem, status=404, code="wrong_kind_of_model")

    def _encoding(self, prepare: Callable[[EncoderService, Any], embeddings.EmbeddingJob]) -> Any:
        async def route(request: Request) -> Response:
            job = await self._prepared(request, prepare)
            front: EncoderFront = self.service.front  # pyright: ignore[reportAssignmentType]
            return Json(job.document(await while_connected(request.receive, front.vectors(job.rows))))

        return route

    def _generating(self, prepare: Callable[[Service, Any], GenerationJob]) -> Any:
        async def route(request: Request) -> Response:
            job = await self._prepared(request, prepare)
            if job.wanted is not None:
                await while_connected(request.receive, job.compile(self._compiling))
            if job.scored:
                await while_connected(request.receive, job.compile_prompts(self._compiling_prompts))
            return await job.respond(request)

        return route

    def _computing(self, work: Callable[[Any, Any], Any]) -> Any:
        async def route(request: Request) -> Response:
            return Json(await self._prepared(request, work))

        return route

    async def _prepared(self, request: Request, work: Callable[[Any, Any], Any]) -> Any:
        body = await read_json_body(request, self.service.limits)
        foreign = isinstance(body, dict) and body.get("chat_template") is not None
        threads = self._foreign if foreign else self._slow
        return await asyncio.get_running_loop().run_in_executor(threads, work, self.service, body)

    # ---------------------------------------------------------------- stored responses

    async def response(self, request: Request) -> Response:
        store, name = self._store(), request.path_params["name"]
        if request.method == "DELETE":
            return Json(await responses.deleted_response(store, name))
        if wrong := sorted(request.query_params):
            raise ApiError(f"`{wrong[0][:64]}` is not supported", param=wrong[0][:64], code="unsupported_parameter")
        return Json(store.get(name).document)

    async def cancel(self, request: Request) -> Response:
        return Json(await responses.cancelled_response(self._store(), request.path_params["name"]))

    def _store(self) -> ResponseStore:
        service = self.service
        if not isinstance(service, Service) or service.store is None:
            raise responses.no_store()
        return service.store

    # ---------------------------------------------------------------- the server itself

    async def models(self, request: Request) -> Response:
        return Json({"object": "list", "data": [self._card(name) for name in self.service.names]})

    async def model(self, request: Request) -> Response:
        self.service.check_model(name := request.path_params["name"])
        return Json(self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        """The entry of /v1/models for the model or one of its adapters."""
        service = self.service
        return {
            "id": name, "object": "model", "created": service.created, "owned_by": "argosy",
            "root": name, "parent": None if name == service.name else service.name, "max_model_len": service.context,
            # Under llama.cpp's name. Benchmarks draw random token ids below it.
            "meta": {"n_vocab": service.lm.config.vocab},
        }  # fmt: skip

    async def tokenizer_info(self, request: Request) -> Response:
        """The fields of the model's tokenizer_config.json that vLLM returns: special tokens by role, and the chat template."""
        tokenizer = self.service.lm.tokenizer
        if tokenizer is None:
            raise ApiError("the model has no tokenizer", status=404)
        more = {} if tokenizer.chat_template is None else {"chat_template": tokenizer.chat_template}
        return Json(dict(tokenizer.special) | {"add_bos_token": tokenizer.adds_bos} | more)

    async def health(self, request: Request) -> Response:
        """Responds with 200 and no body, or with 503 if the engine has died or the server is shutting down."""
        front = self.service.front
        if front.failed or front.draining:
            raise engine_died_error() if front.failed else shutting_down()
        return Response()

    async def load(self, request: Request) -> Response:
        return Json({"server_load": len(self.service.front.opened)})

    async def version(self, request: Request) -> Response:
        return Json({"version": version("argosy")})

    async def metrics(self, request: Request) -> Response:
        return Response(self.service.front.metrics.text(), headers={"content-type": CONTENT_TYPE})


def admin_app(admin: Admin, app: App) -> Starlette:
    """The ASGI application of the admin port. All routes need the admin key, except /health."""
    headers = admin.service.limits.headers
    return guarded_app([*admin.routes(), *app.watching], key=admin.settings.key, local=True, headers=headers)


# The function that validates the body of each route and turns it into a job.
GENERATING = {
    "/v1/completions": completions.prepare_completions,
    "/v1/chat/completions": chat.prepare_chat,
    "/v1/responses": responses.prepare_responses,
    "/v1/messages": messages.prepare_messages,
}
ENCODING = {
    "/v1/embeddings": embeddings.prepare_embeddings,
    **dict.fromkeys(("/score", "/v1/score"), embeddings.prepare_score),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), embeddings.prepare_rerank),
}


def tokenize(service: ServedModel[Any], body: Any) -> dict[str, Any]:
    """Responds to /tokenize with the token ids of a text or of a conversation."""
    fields = TokenizeFields.of(body)
    service.check_model(fields.model)
    if fields.messages is not None:
        ids = service.chat_prompt(chat.template_messages(fields.messages), fields.tools, fields)
    else:
        ids = service.tokenized(fields.prompt or "", fields.add_special_tokens is not False)
    names = TokenNames(service.lm.tokenizer, False)
    strings = [names(token) for token in ids] if fields.return_token_strs else None
    return {"count": len(ids), "max_model_len": service.context, "tokens": ids, "token_strs": strings}


def detokenize(service: ServedModel[Any], body: Any) -> dict[str, Any]:
    """Responds to /detokenize with the text of token ids."""
    fields = DetokenizeFields.of(body)
    service.check_model(fields.model)
    tokenizer = service.lm.tokenizer
    if tokenizer is None:
        raise ApiError("the model has no tokenizer", param="tokens")
    if wrong := [token for token in fields.tokens if not 0 <= token < service.lm.config.vocab]:
        raise ApiError(f"{wrong[0]} is no token of this model", param="tokens")
    return {"prompt": tokenizer.decode(fields.tokens)}


# ---------------------------------------------------------------- errors
