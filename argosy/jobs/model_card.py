"""The card of a model for the Hub: a README.md with front matter that the Hub reads, and the lineage in words and numbers.

Nothing in it is invented: what the run, the folder or the base's own card does not say is left out.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from argosy.core.hub.names import HubName, name_of_path
from argosy.core.hub.upload import MARK
from argosy.core.settings.scalars import yaml_document
from argosy.core.settings.words import yaml_text_layer

# Lines of a card that are inherited from the base's.
INHERITED = ("license", "license_name", "license_link", "language")
LIBRARIES = {"hub": "transformers", "compressed-tensors": "transformers", "peft": "peft", "diffusers": "diffusers", "gguf": "gguf"}
RELATIONS = {"peft": "adapter", "compressed-tensors": "quantized", "gguf": "quantized"}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Lineage:
    """The origin of a model.

    kind: the format: hub, compressed-tensors, peft, diffusers, gguf or argosy.
    base: the model that it was trained or quantized from, None for random weights or if unknown.
    settings: the resolved settings of the run; empty for folders.
    numbers: the last loss and evaluations of the run, by name.
    step: the step of the checkpoint.
    about: other facts for the table, by name.
    """

    kind: str
    base: HubName | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    step: int | None = None
    about: Mapping[str, str] = field(default_factory=dict)


def hub_base(*names: Any) -> HubName | None:
    """Returns the first name that is one of a model on the Hub: `hf:OWNER/NAME`, a path in the Hub's cache, or OWNER/NAME."""
    for address in (str(name) for name in names if name):
        if address.startswith("hf:"):
            return HubName.parse(address)
        if (hub_name := name_of_path(address)) is not None:
            return hub_name
        if _HUB_ID.fullmatch(address) and not Path(address).exists():
            return HubName(address)
    return None


def card_front(text: str) -> dict[str, Any]:
    """Reads the front matter of a card; empty if there is none that can be read."""
    match = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", text, re.DOTALL)
    try:
        return dict(yaml_text_layer(match[1], "README.md").values) if match else {}
    except Exception:
        # Cards are written by hand, and other people's.
        return {}


def model_card(name: HubName, lineage: Lineage, *, license: str | None = None, base_card: str = "", tags: Sequence[str] = ()) -> str:
    """Writes the card of a model. Returns its text.

    Args:
        name: the name of the model on the Hub.
        lineage: the origin of the model.
        license: the license. None inherits that of the base.
        base_card: the text of the base's card, whose license and languages are inherited.
        tags: further tags.
    """
    inherited = {key: value for key, value in card_front(base_card).items() if key in INHERITED}
    if license is not None:
        inherited = {"license": license} | {k: v for k, v in inherited.items() if k == "language"}
    front: dict[str, Any] = {"library_name": LIBRARIES.get(lineage.kind, "argosy"), **inherited}
    if lineage.base is not None:
        front["base_model"] = lineage.base.repository
        front["base_model_relation"] = RELATIONS.get(lineage.kind, "finetune")
    if sets := [dataset.repository for dataset in datasets(lineage.settings)]:
        front["datasets"] = sets
    if lineage.kind != "diffusers" and lineage.settings.get("model", {}).get("causal", True):
        front["pipeline_tag"] = "text-generation"
    elif lineage.kind == "diffusers":
        front["pipeline_tag"] = "text-to-image"
    front["tags"] = list(dict.fromkeys(["argosy", *tags, *([_objective(lineage.settings)] if lineage.settings else [])]))
    parts = [f"---\n{yaml_document(front).strip()}\n---", MARK, f"# {name.short}", _summary(lineage), "## Use", _use(name, lineage)]
    if rows := _training(lineage):
        parts += ["## Training", _table(("setting", "value"), rows)]
    if lineage.numbers:
        numbers = [(f"`{key}`", f"{value:.6g}") for key, value in lineage.numbers.items()]
        parts += ["## Results", f"At step {lineage.step}, as the run measured them." if lineage.step is not None else ""]
        parts += [_table(("number", "value"), numbers)]
    return "\n\n".join(part for part in parts if part) + "\n"


def datasets(settings: Mapping[str, Any]) -> list[HubName]:
    """The data sets of the Hub among the sources of a run."""
    source = (settings.get("data") or {}).get("source")
    places = [part.get("path") if isinstance(part, Mapping) else part for part in (source if isinstance(source, list) else [source])]
    matches = [re.match(r"hf:([\w.-]+/[\w.-]+)", str(place)) for place in places if place]
    return [HubName(match[1]) for match in matches if match]


def _objective(settings: Mapping[str, Any]) -> str:
    return str((settings.get("objective") or {}).get("name") or "next_token")


def _summary(lineage: Lineage) -> str:
    kind = {
        "peft": "Low-rank adapters",
        "diffusers": "A pipeline that draws images",
        "gguf": "A model in a GGUF file",
        "compressed-tensors": "A language model in few bits",
    }.get(lineage.kind, "A model")
    base = lineage.base
    on = f" {'for' if lineage.kind == 'peft' else 'from'} `{base.repository}`" if base else ""
    commit = f", commit `{base.revision[:12]}`" if base and base.revision and base.is_pinned else ""
    trained = ", trained" if lineage.settings else ", written"
    return f"{kind}{on}{commit}{trained} with Argosy {version('argosy')}."


def _use(name: HubName, lineage: Lineage) -> str:
    place = f"hf:{name.repository}" + (f"@{name.revision}" if name.revision else "")
    if lineage.kind == "diffusers":
        return f'```\nargosy generate {place} "a fox" image=fox.png\n```'
    shell = f'```\nargosy generate {place} "Once upon a time"\n```'
    ours = f'```python\nimport argosy\n\nlm = argosy.load("{place}")\n```'
    library = LIBRARIES.get(lineage.kind, "")
    reader = {"transformers": "AutoModelForCausalLM", "peft": "AutoPeftModelForCausalLM"}.get(library)
    theirs = f'```python\nfrom {library} import {reader}\n\nmodel = {reader}.from_pretrained("{name.repository}")\n```'
    return "\n\n".join([shell, ours, *([theirs] if reader else [])])


def _training(lineage: Lineage) -> list[tuple[str, str]]:
    settings, rows = lineage.settings, [(key, value) for key, value in lineage.about.items()]
    if not settings:
        return rows
    data, optimizer = settings.get("data") or {}, settings.get("optimizer") or {}
    adapter = settings.get("adapter") or {}
    batch, sequence = data.get("batch"), data.get("sequence")
    facts = {
        "objective": _objective(settings),
        "data": _data(data.get("source")),
        "steps": f"{lineage.step:,} of {settings.get('steps'):,}" if lineage.step is not None else settings.get("steps"),
        "batch": f"{batch} sequences of {sequence} tokens" if batch and sequence else None,
        "optimizer": optimizer.get("name"),
        "learning rate": optimizer.get("learning_rate"),
        "adapter": f"{adapter.get('name')}, rank {adapter.get('rank')}" if adapter.get("rank") else None,
        "precision": settings.get("precision"),
        "random seed": settings.get("seed"),
    }
    return rows + [(key, str(value)) for key, value in facts.items() if value is not None]


def _data(source: Any) -> str | None:
    """Sources without the folders of this machine."""
    places = [part.get("path") if isinstance(part, Mapping) else part for part in (source if isinstance(source, list) else [source])]
    names = [str(place) if "://" in str(place) or str(place).startswith("hf:") else Path(str(place)).name for place in places if place]
    return ", ".join(f"`{name}`" for name in names) or None


def _table(head: tuple[str, str], rows: Sequence[tuple[str, str]]) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "| --- | --- |", *(f"| {key} | {value} |" for key, value in rows)]
    return "\n".join(lines)
