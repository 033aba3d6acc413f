"""The page at `/`: models and versions, their batches and latencies, and a form that calls a signature."""

from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from argosy.export.manifest import BundleSignature
from argosy.export.steps import DecodeImageStep
from argosy.predict.protocol import input_specs
from argosy.predict.repository import Repository
from argosy.web.errors import Json
from argosy.web.pages import page_routes

FOLDER = Path(__file__).parent / "web"


def model_page_routes(repository: Repository, keyed: bool) -> list[Route]:
    """Returns the routes of the page.

    Args:
        keyed: whether the server has an API key.
    """

    async def models(request: Request) -> Response:
        return Json(repository_facts(repository), headers={"cache-control": "no-store"})

    return [*page_routes(FOLDER, keyed), Route("/web/models", models, methods=["GET"])]


def repository_facts(repository: Repository) -> list[dict[str, Any]]:
    """Describes every version in the repository: whether it is ready or the reason why not, and its signatures with example inputs."""
    facts = []
    for name, state in repository.models.items():
        for number in sorted({*state.versions, *state.reasons}):
            version = state.versions.get(number)
            about = {"name": name, "version": str(number), "ready": version is not None, "reason": state.reasons.get(number, "")}
            signatures = {} if version is None else version.bundle.manifest.signatures
            facts.append(about | {"signatures": [_described(of, signature) for of, signature in signatures.items()]})
    return facts


def _described(name: str, signature: BundleSignature) -> dict[str, Any]:
    about = {"name": name, "description": signature.description or ""}
    files = {step.input for step in signature.preprocess if isinstance(step, DecodeImageStep)}
    inputs = [spec | ({"file": True} if spec["name"] in files else {}) for spec in input_specs(signature)]
    return about | {"inputs": inputs, "example": signature.example or {}}
