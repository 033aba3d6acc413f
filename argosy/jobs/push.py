"""`argosy push`: a run, a checkpoint or a folder as a model of the Hub, with a card that is written from its lineage.

A run or a checkpoint is converted into a folder of the Hub's layout first, in the cache: a push that was killed or tried (`dry=true`)
is not converted again. Folders that have a layout of the Hub already go up as they are.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argosy.checkpoint.open import open_model
from argosy.checkpoint.run_directory import SETTINGS
from argosy.core.addresses import is_hub
from argosy.core.caches import cache_home
from argosy.core.errors import BadInput
from argosy.core.hub.download import local_model
from argosy.core.hub.names import FORM, HubName
from argosy.core.hub.selection import PICKLES
from argosy.core.hub.upload import CARD, push_files
from argosy.core.settings import yaml_layer
from argosy.jobs.convert import DTYPES, convert
from argosy.jobs.history import listing
from argosy.jobs.model_card import Lineage, hub_base, model_card
from argosy.run.settings.recipe_files import no_model
from argosy.weights.hub.config import read_json_object

Say = Callable[[str], None]
MEASURED = ("loss", "reward", "eval_loss", "eval_perplexity", "eval_bits_per_byte")
LAYOUTS = {"model_index.json": "diffusers", "adapter_config.json": "peft", "config.json": "hub"}


@dataclass(frozen=True)
class PushSource:
    """The folder or file to upload, and its origin.

    path: the folder or file.
    lineage: the origin of the model.
    staged: whether the folder was written for this push, and is removed after it.
    """

    path: Path
    lineage: Lineage
    staged: bool = False

    def files(self, say: Say) -> dict[str, Path | bytes]:
        """Files by their names in the repository: without hidden ones, unfinished ones and pickles."""
        if self.path.is_file():
            return {self.path.name: self.path}
        paths = {str(path.relative_to(self.path)): path for path in sorted(self.path.rglob("*")) if path.is_file()}
        paths = {name: path for name, path in paths.items() if not any(part.startswith(".") for part in Path(name).parts)}
        left_out = [name for name, path in paths.items() if path.suffix == ".part" or any(path.match(pattern) for pattern in PICKLES)]
        if left_out:
            say(f"left out, because pickles may run code as they are read: {', '.join(left_out[:6])}{', ...' * (len(left_out) > 6)}")
        return {name: path for name, path in paths.items() if name not in left_out}


def push(
    model: str,
    target: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
    merge: bool = False,
    dtype: str | None = None,
    license: str | None = None,
    card: str = "keep",
    dry: bool = False,
    say: Say = lambda _: None,
) -> dict[str, Any]:
    """Uploads a model. Returns the facts about what was sent, or with `dry` would be sent.

    Raises:
        BadInput: there is no such model, the target is not a name on the Hub, or the Hub does not permit the upload.
        ArgosyError: the connection broke. The same command resumes.
    """
    if not is_hub(target):
        raise BadInput(f"`{target}` is no name of the Hub", hint=f"argosy push {model} hf:OWNER/NAME")
    name = HubName.parse(target)
    if name.file or "/" not in name.repository:
        raise BadInput(f"`{target}` names no repository to write", hint=FORM.split(",")[0])
    if revision is not None:
        name = name.at(revision)
    if not Path(model).exists():
        raise no_model(model)
    source = push_source(Path(model), merge=merge, dtype=dtype, say=say)
    files = source.files(say)
    own_card = CARD in files
    if not own_card:
        base_card = _base_card(source.lineage)
        files[CARD] = model_card(name, source.lineage, license=license, base_card=base_card).encode()
    elif license is not None:
        raise BadInput(f"license={license}, and {Path(model) / CARD} is a card of its own", hint="write the license into it")
    listed = [{"path": file, "bytes": len(c) if isinstance(c, bytes) else c.stat().st_size} for file, c in sorted(files.items())]
    text = files[CARD]
    card_text = text.decode() if isinstance(text, bytes) else text.read_text(encoding="utf-8")
    done = push_files(
        files,
        name,
        message or f"{Path(model).resolve().name}, by argosy push",
        private=private,
        replaces_card=card == "replace",
        dry=dry,
        say=say,
    )
    if source.staged and not dry:
        shutil.rmtree(source.path)
    return {
        "model": model,
        "repository": name.repository,
        "revision": name.revision,
        "url": done.url,
        "commit": done.commit,
        "private": private,
        "kind": source.lineage.kind,
        "files": listed,
        "removed": done.removed,
        "card": "kept" if done.kept_card else "own" if own_card else "written",
        "card_text": card_text,
        "dry": dry,
    }


def push_source(model: Path, *, merge: bool = False, dtype: str | None = None, say: Say = lambda _: None) -> PushSource:
    """Returns the folder or file to upload for a model, which is converted first if necessary.

    Raises:
        BadInput: this is not a model, or a setting does not apply to its kind.
    """
    kind = "gguf" if model.suffix == ".gguf" else next((LAYOUTS[name] for name in LAYOUTS if (model / name).is_file()), None)
    if kind is not None:
        for key, value in (("merge", merge), ("dtype", dtype)):
            if value:
                raise BadInput(f"{key} is for runs and checkpoints; {model} goes up as it is", hint="`argosy convert` first")
        return PushSource(model, _folder_lineage(model, kind))
    opened = open_model(model, say)
    if dtype is not None and dtype not in DTYPES:
        raise BadInput(f"dtype={dtype}", hint=f"one of {', '.join(DTYPES)}")
    lineage = run_lineage(model, opened)
    if opened.quantized is not None:
        # Its codes have no place in a folder of transformers.
        return PushSource(opened.path, lineage)
    to = "hub" if opened.adapted is None or merge else "peft"
    if merge and opened.adapted is None:
        raise BadInput(f"merge=true, and {model} has no adapters", hint="leave it out")
    folder = _staging(opened.path, to, dtype)
    if not folder.exists():
        say(f"writing {'its adapters' if to == 'peft' else 'a folder of the Hub'} in {folder}")
        folder.parent.mkdir(parents=True, exist_ok=True)
        convert(str(opened.path), folder, to, dtype if to == "hub" else None, say=say)
    about = lineage.about if to == "peft" or opened.adapted is None else {**lineage.about, "adapters": "merged into the weights"}
    return PushSource(folder, Lineage(to, lineage.base, lineage.settings, lineage.numbers, lineage.step, about), staged=True)


def run_lineage(model: Path, opened: Any) -> Lineage:
    """The lineage of a run or of one of its checkpoints."""
    run = next((folder for folder in (model, *model.absolute().parents[:2]) if (folder / SETTINGS).is_file()), None)
    settings = {} if run is None else dict(yaml_layer(run / SETTINGS).values)
    init = settings.get("init") or {}
    base = hub_base(init.get("weights"), opened.adapted.base.path if opened.adapted else None, opened.hub.get("_name_or_path"))
    step = int(opened.path.name) if opened.path.name.isdecimal() else None
    # The last numbers of a run are those of its last checkpoint.
    ended = None if run is None else listing.summary(run)
    numbers = {k: v for k, v in ended.numbers.items() if k in MEASURED} if ended is not None and ended.step == step else {}
    if settings:
        # Whoever reads cards wants to know whether the model continues text.
        settings["model"] = {**(settings.get("model") or {}), "causal": bool(opened.config.causal)}
    return Lineage("argosy", base, settings, numbers, step)


def _folder_lineage(model: Path, kind: str) -> Lineage:
    if kind == "peft":
        config = read_json_object(model / "adapter_config.json")
        base = hub_base(config.get("base_model_name_or_path"))
        return Lineage(kind, base.at(str(config["revision"])) if base and config.get("revision") and not base.revision else base)
    if kind != "hub":
        return Lineage(kind)
    config = read_json_object(model / "config.json")
    packed = (config.get("quantization_config") or {}).get("quant_method") == "compressed-tensors"
    return Lineage("compressed-tensors" if packed else kind, hub_base(config.get("_name_or_path")))


def _base_card(lineage: Lineage) -> str:
    """The card of the base, if it is in the cache: a push asks for no other model."""
    if lineage.base is None or not lineage.base.is_pinned:
        return ""
    try:
        path = Path(local_model(str(lineage.base), small=True)) / CARD
    except Exception:
        # It names a license, which is left out where it is not known.
        return ""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _staging(checkpoint: Path, to: str, dtype: str | None) -> Path:
    """A folder of the cache for the conversion of one checkpoint."""
    home = cache_home()
    if home is None:
        raise BadInput("no folder for the conversion: this user has no home directory", hint="set XDG_CACHE_HOME")
    files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(checkpoint.iterdir()) if file.is_file()]
    identity = json.dumps([str(checkpoint.resolve()), files, to, dtype])
    return home / "push" / hashlib.sha256(identity.encode()).hexdigest()[:16]
