"""Selects the files of a repository to download for a model: safetensors, and the small files beside them. Never pickles.

Many repositories hold the same weights several times: as pickles, as safetensors in float32 and float16 (`model.fp16.safetensors`), as
Meta's `original/`, and as Mistral's `consolidated.safetensors`. Only one of these is selected.
"""

from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from argosy.core.errors import BadInput
from argosy.core.formats.safetensors import STEMS

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.msgpack", "*.h5")
ADAPTER = "adapter_model.safetensors"
# Patterns of the small files of a folder: config, vocabularies, templates, the card and the license.
SMALL = ("*.json", "*.jinja", "*.model", "*.tiktoken", "vocab.txt", "merges.txt", "README.md", "LICENSE*", "NOTICE*")
BELOW = ("additional_chat_templates/*.jinja", "1_Pooling/config.json")
# Folders of an image pipeline that are not used here.
UNUSED = ("safety_checker", "feature_extractor", "image_encoder")
PIPELINE, CHECKPOINT = "model_index.json", "meta.json"


def model_files(files: Collection[str], name: str, file: str | None = None, *, small: bool = False) -> list[str]:
    """Selects the files to transfer.

    Args:
        files: all files of the repository.
        name: the name of the model, for errors.
        file: the only .gguf file or folder to select; None: the whole repository.
        small: whether weights are left out.

    Raises:
        BadInput: there are no weights, only pickles, or no such file.
    """
    if file is not None:
        return _of_file(files, name, file.rstrip("/"), small)
    if PIPELINE in files and not small:
        return _of_pipeline(files, name)
    if CHECKPOINT in files and not small:
        # Argosy has written this folder in its own layout.
        return [path for path in files if not _is_pickle(path)]
    small_files = _small_files(files, "")
    if small:
        return small_files
    weights = _weights(files, "")
    if not weights:
        return _without_safetensors(files, name)
    return small_files + weights


def _of_file(files: Collection[str], name: str, file: str, small: bool) -> list[str]:
    if file in files:
        if _is_pickle(file):
            raise BadInput(f"{file} is a pickle, which may run code as it is read", where=name, hint="name a .gguf file or a folder")
        return [] if small and file.endswith(".gguf") else [file]
    inside = [path for path in files if path.startswith(f"{file}/")]
    if not inside:
        choices = sorted({path for path in files if path.endswith(".gguf")} | {path.split("/")[0] for path in files if "/" in path})
        hint = f"it has {', '.join(choices[:8])}" if choices else "leave out what follows the last colon"
        raise BadInput(f"{name} has no file or folder `{file}`", hint=hint)
    selection = model_files([path.removeprefix(f"{file}/") for path in inside], f"{name}:{file}", small=small)
    return [f"{file}/{path}" for path in selection]


def _of_pipeline(files: Collection[str], name: str) -> list[str]:
    folders = sorted({path.split("/")[0] for path in files if path.count("/") == 1})
    selection = [PIPELINE, *(path for path in files if path in ("README.md",) or fnmatchcase(path, "LICENSE*"))]
    for folder in folders:
        if folder in UNUSED:
            continue
        small = _small_files(files, f"{folder}/")
        weights = _weights(files, f"{folder}/")
        if not weights and any(_is_pickle(path) for path in files if path.startswith(f"{folder}/")):
            raise _only_pickles(name, f"{folder}/")
        selection += small + weights
    return selection


def _small_files(files: Collection[str], folder: str) -> list[str]:
    """The small files of one folder: those that match SMALL or BELOW. `folder` is empty or ends with `/`."""
    inside = [path.removeprefix(folder) for path in files if path.startswith(folder)]
    direct = [path for path in inside if "/" not in path and any(fnmatchcase(path, pattern) for pattern in SMALL)]
    deeper = [path for path in inside if "/" in path and any(fnmatchcase(path, pattern) for pattern in BELOW)]
    return [f"{folder}{path}" for path in (*direct, *deeper) if not path.endswith(".bin.index.json")]


def _weights(files: Collection[str], folder: str) -> list[str]:
    """The safetensors of one folder: those that `SafetensorsFolder` would read. `folder` is empty or ends with `/`."""
    inside = {path.removeprefix(folder) for path in files if path.startswith(folder)}
    for stem in STEMS:
        if f"{stem}.safetensors" in inside:
            return [f"{folder}{stem}.safetensors"]
    for stem in STEMS:
        if f"{stem}.safetensors.index.json" in inside:
            shards = sorted(path for path in inside if fnmatchcase(path, f"{stem}-?????-of-?????.safetensors"))
            # Shards may have other names, which only the index tells, and the index is not downloaded yet.
            every = shards or sorted(path for path in inside if "/" not in path and path.endswith(".safetensors"))
            return [f"{folder}{path}" for path in every]
    return [f"{folder}{ADAPTER}"] if ADAPTER in inside else []


def _without_safetensors(files: Collection[str], name: str) -> list[str]:
    blocks = sorted(path for path in files if path.endswith(".gguf"))
    if len(blocks) == 1:
        return blocks
    if blocks:
        listed = ", ".join(f"`{name}:{path}`" for path in blocks[:6])
        raise BadInput(f"{name} has {len(blocks)} .gguf files", hint=f"name one of them: {listed}{', ...' * (len(blocks) > 6)}")
    if any(map(_is_pickle, files)):
        raise _only_pickles(name)
    other = sorted(path for path in files if path.endswith(".safetensors"))
    where = f"it has {', '.join(other[:4])}" if other else f"it has {', '.join(sorted(files)[:6]) or 'no files'}"
    raise BadInput(f"{name} has no model.safetensors, no index of shards and no .gguf file", where=where)


def _only_pickles(name: str, folder: str = "") -> BadInput:
    return BadInput(
        f"{name} has its weights only as pickles{f' in {folder}' if folder else ''}, which may run code as they are read",
        hint="its authors, or a branch such as refs/pr/1, may have safetensors (hf:NAME@refs/pr/1); or convert it with transformers: "
        "`model.save_pretrained(FOLDER)`",
    )


def _is_pickle(file: str) -> bool:
    return any(fnmatchcase(PurePosixPath(file).name, pattern) for pattern in PICKLES)
