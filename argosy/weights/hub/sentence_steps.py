"""The steps from the vectors of tokens to that of a text, in the small files of sentence-transformers beside a model's weights.

modules.json lists the steps, 1_Pooling/config.json says how token vectors become one, sentence_bert_config.json how many tokens are
read. A step that is not built is an error. Without these files the result is the mean over all tokens, not normalized.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argosy.core.errors import BadInput, Damaged
from argosy.data.tokenizers.config import read_object, read_text

POOLINGS = ("mean", "cls", "max", "last")
# Their names in 1_Pooling/config.json.
MODES = {
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "last": "pooling_mode_lasttoken",
}


@dataclass(frozen=True)
class EmbeddingSteps:
    """pooling: how token vectors become one.
    normalize: scales the result to length 1.
    tokens: the most tokens that are read; None: as many as the model takes.
    lower, prompt: how a text is changed before.
    """

    pooling: str
    normalize: bool = False
    tokens: int | None = None
    lower: bool = False
    prompt: str = ""


def read_steps(folder: Path, pooling: str | None = None, otherwise: str = "mean") -> EmbeddingSteps:
    """The steps that sentence-transformers would take with this model.

    Args:
        pooling: overrides the folder's.
        otherwise: the pooling where the folder says nothing of it.

    Raises:
        BadInput: a step, or a way to pool, that is not built.
        Damaged: files with invalid contents.
    """
    beside = read_object(folder / "sentence_bert_config.json")
    tokens = beside.get("max_seq_length") or read_object(folder / "tokenizer_config.json").get("model_max_length")
    prompt = _prompt(read_object(folder / "config_sentence_transformers.json"))
    most = int(tokens) if isinstance(tokens, int | float) and tokens > 0 else None
    read: dict[str, Any] = {"pooling": otherwise, "tokens": most, "lower": bool(beside.get("do_lower_case"))}
    for kind, where in _modules(folder):
        if kind == "Pooling":
            config = read_object(folder / where / "config.json")
            read["pooling"] = pooling or _pooling(config, prompt, str(folder / where))
        elif kind == "Normalize":
            read["normalize"] = True
        elif kind != "Transformer":
            raise BadInput(f"the step `{kind}` of modules.json is not built", where=str(folder))
    return EmbeddingSteps(**read, prompt=prompt)


def _modules(folder: Path) -> list[tuple[str, str]]:
    """The steps in modules.json and their folders; none without the file."""
    if not (folder / "modules.json").is_file():
        return []
    try:
        listed = json.loads(read_text(folder / "modules.json", 1 << 20))
        return [(str(one["type"]).rpartition(".")[2], str(one["path"])) for one in listed]
    except (ValueError, TypeError, KeyError):
        raise Damaged("modules.json lists no modules", where=str(folder)) from None


def _pooling(config: Mapping[str, Any], prompt: str, where: str) -> str:
    """The single pooling mode that a Pooling module is set to."""
    modes = [config["pooling_mode"]] if isinstance(config.get("pooling_mode"), str) else []
    modes += [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    found = [name for name in POOLINGS if name in modes or MODES[name] in modes]
    if len(modes) != 1 or not found:
        raise BadInput(f"pooling by {' and '.join(modes) or 'nothing'} is not built", where=where, hint="pass pooling=")
    if prompt and config.get("include_prompt") is False:
        raise BadInput("pooling that leaves out the prompt is not built", where=where)
    return found[0]


def _prompt(config: Mapping[str, Any]) -> str:
    """The text put before every text."""
    prompts = config.get("prompts")
    return str(prompts.get(config.get("default_prompt_name")) or "") if isinstance(prompts, dict) else ""


def write_steps(folder: Path, steps: EmbeddingSteps, width: int) -> None:
    """Writes the files that `read_steps` reads, as sentence-transformers does.

    Args:
        width: numbers of a vector.
    """
    listed = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if steps.normalize else [])]
    known = "sentence_transformers.models"
    modules = [{"idx": i, "name": str(i), "path": path, "type": f"{known}.{kind}"} for i, (path, kind) in enumerate(listed)]
    pooling = {"word_embedding_dimension": width, **{mode: name == steps.pooling for name, mode in MODES.items()}}
    beside = {"max_seq_length": steps.tokens, "do_lower_case": steps.lower}
    (folder / "1_Pooling").mkdir(exist_ok=True)
    for name, content in (("modules.json", modules), ("1_Pooling/config.json", pooling), ("sentence_bert_config.json", beside)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
