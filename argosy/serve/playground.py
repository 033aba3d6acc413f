"""The playground and the dashboard at `/`, and the facts about the model that they fetch from `/web/model`."""

from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from argosy.serve.service import Service
from argosy.web.errors import Json
from argosy.web.pages import page_routes

FOLDER = Path(__file__).parent / "web"


def playground_routes(service: Service, keyed: bool) -> list[Route]:
    """The routes of the playground and the dashboard.

    Args:
        keyed: whether the server has an API key.
    """

    async def model(request: Request) -> Response:
        return Json(page_facts(service), headers={"cache-control": "no-store"})

    return [*page_routes(FOLDER, keyed), Route("/web/model", model, methods=["GET"])]


def page_facts(service: Service) -> dict[str, Any]:
    """The facts about the model that the page needs: its name, whether it has a chat template, its context in tokens, its sampling
    defaults, and the most likeliest tokens that a request may ask for."""
    return {
        "name": service.name,
        "chat": "default" in (getattr(service.lm.tokenizer, "chat_templates", None) or {}),
        "context": service.context,
        "defaults": service.defaults,
        "logprobs": service.limits.logprobs,
    }
