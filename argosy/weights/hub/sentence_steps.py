"""Reads and writes the steps from token vectors to a sentence embedding, which sentence-transformers stores beside a model's weights.

modules.json lists the steps. 1_Pooling/config.json says how token vectors are pooled, sentence_bert_config.json how many tokens are
read, and config_sentence_transformers.json which prompts precede texts. A step that is not implemented is an error. Without these
files the embedding is the mean over all tokens, not normalized.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from argosy.core.errors import BadInput, Damaged, nearest
from argosy.data.tokenizers.config import read_object, read_text

POOLINGS = ("mean", "cls", "max", "last")
# The possible names of the prompts for queries and for documents. sentence-transformers takes the first one that a folder has.
QUERY_PROMPTS, DOCUMENT_PROMPTS = ("query",), ("document", "passage", "corpus")
# The key of each pooling in 1_Pooling/config.json.
MODES = {
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "last": "pooling_mode_lasttoken",
}
# The value of the newer key `pooling_mode`, where it is not the name here.
SHORT = {"last": "lasttoken"}


@dataclass(frozen=True)
class EmbeddingSteps:
    """The steps from token vectors to a sentence embedding.

    pooling: how token vectors are pooled to one (`POOLINGS`).
    normalize: whether embeddings are scaled to length 1.
    tokens: the most tokens of a text that are read. None reads as many as the model takes.
    lower: whether texts are converted to lower case.
    prompts: the prefixes that are put before texts, by name, such as "query: " for queries.
    default_prompt: the name of the prompt for texts whose prompt is not named. None puts nothing before them.
    include_prompt: whether the vectors of the prompt's tokens are pooled too.
    """

    pooling: str
    normalize: bool = False
    tokens: int | None = None
    lower: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    include_prompt: bool = True

    @property
    def prompt(self) -> str:
        """The prompt for texts whose prompt is not named, possibly empty."""
        return self.prompts.get(self.default_prompt or "", "")

    def prompt_named(self, name: str | None) -> str:
        """Returns the prompt of this name; for None the default prompt.

        Raises:
            BadInput: there is no such prompt.
        """
        if name is None:
            return self.prompt
        if name not in self.prompts:
            hint = nearest(name, list(self.prompts)) if self.prompts else "this model has no prompts"
            raise BadInput(f"no prompt `{name[:64]}`", hint=hint)
        return self.prompts[name]

    def role(self, names: tuple[str, ...]) -> str | None:
        """Returns the first of these names for which there is a prompt; None if there is none."""
        return next((name for name in names if name in self.prompts), None)


def read_steps(folder: Path, pooling: str | None = None, otherwise: str = "mean") -> EmbeddingSteps:
    """Reads the steps that sentence-transformers would run with a model's folder.

    Args:
        pooling: replaces the pooling of the folder.
        otherwise: the pooling for a folder that names none.

    Raises:
        BadInput: a step or a kind of pooling is not implemented.
        Damaged: a file has invalid contents.
    """
    bert_config = read_object(folder / "sentence_bert_config.json")
    tokens = bert_config.get("max_seq_length") or read_object(folder / "tokenizer_config.json").get("model_max_length")
    prompts, default = _prompts(read_object(folder / "config_sentence_transformers.json"), str(folder))
    most = int(tokens) if isinstance(tokens, int | float) and tokens > 0 else None
    read: dict[str, Any] = {"pooling": pooling or otherwise, "tokens": most, "lower": bool(bert_config.get("do_lower_case"))}
    for kind, where in _modules(folder):
        if kind == "Pooling":
            config = read_object(folder / where / "config.json")
            read["pooling"] = pooling or _pooling(config, str(folder / where))
            read["include_prompt"] = config.get("include_prompt") is not False
        elif kind == "Normalize":
            read["normalize"] = True
        elif kind != "Transformer":
            raise BadInput(f"the step `{kind}` of modules.json is not built", where=str(folder))
    return EmbeddingSteps(**read, prompts=prompts, default_prompt=default)


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Returns (kind, folder) of each step in modules.json; nothing without the file."""
    if not (folder / "modules.json").is_file():
        return []
    try:
        listed = json.loads(read_text(folder / "modules.json", 1 << 20))
        return [(str(module["type"]).rpartition(".")[2], str(module["path"])) for module in listed]
    except (ValueError, TypeError, KeyError):
        raise Damaged("modules.json lists no modules", where=str(folder)) from None


def _pooling(config: Mapping[str, Any], where: str) -> str:
    """Returns the pooling that the config of a Pooling module selects. Several at once are an error."""
    modes = [config["pooling_mode"]] if isinstance(config.get("pooling_mode"), str) else []
    modes += [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    matches = [name for name in POOLINGS if name in modes or MODES[name] in modes or SHORT.get(name) in modes]
    if len(modes) != 1 or not matches:
        raise BadInput(f"pooling by {' and '.join(modes) or 'nothing'} is not built", where=where, hint="pass pooling=")
    return matches[0]


def _prompts(config: Mapping[str, Any], where: str) -> tuple[dict[str, str], str | None]:
    """Returns the prompts by name, and the name of the default prompt. A null prompt is read as an empty text."""
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise Damaged("`prompts` in config_sentence_transformers.json are no texts by name", where=where)
    if default is not None and default not in prompts:
        problem = f"default_prompt_name is `{str(default)[:64]}`, and `prompts` in config_sentence_transformers.json has no such name"
        raise Damaged(problem, where=where)
    return {name: text or "" for name, text in prompts.items()}, default


def trained_steps(objective: Any, data: Any, stored: EmbeddingSteps | None) -> EmbeddingSteps:
    """Returns the steps of a model that was trained with these settings. If all texts had the same prompt in training, it becomes the
    default prompt. Otherwise the prompts of anchors and positives become those of queries and documents.

    Args:
        objective: the settings of the objective.
        data: the settings of the data.
        stored: the steps of the model that training started from. Its other prompts are kept.
    """
    prompts, default = dict(stored.prompts if stored else {}), None
    texts = dict(data.prompts)
    if texts:
        graded = "sentence1" in texts or "sentence2" in texts
        names = {"sentence1": "sentence1", "sentence2": "sentence2"} if graded else {"query": "anchor", "document": "positive"}
        training_prompts = {name: texts.get(column, "") for name, column in names.items()}
        if len(set(training_prompts.values())) == 1:
            text = next(iter(training_prompts.values()))
            default = next((name for name, prompt in prompts.items() if prompt == text), "default")
            training_prompts = {default: text}
        prompts |= training_prompts
    # Without prompts in training, the stored prompts stay as they are.
    pools = stored.include_prompt if stored and not texts else getattr(objective, "include_prompt", True)
    options: dict[str, Any] = {"include_prompt": pools}
    return EmbeddingSteps(objective.text_pooling, True, data.sequence, prompts=prompts, default_prompt=default, **options)


def write_steps(folder: Path, steps: EmbeddingSteps, width: int) -> None:
    """Writes the files that `read_steps` reads, as sentence-transformers does.

    Args:
        width: the size of an embedding.
    """
    listed = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if steps.normalize else [])]
    package = "sentence_transformers.models"
    modules = [{"idx": i, "name": str(i), "path": path, "type": f"{package}.{kind}"} for i, (path, kind) in enumerate(listed)]
    pooling = {"word_embedding_dimension": width, **{mode: name == steps.pooling for name, mode in MODES.items()}}
    pooling |= {"include_prompt": steps.include_prompt}
    bert_config = {"max_seq_length": steps.tokens, "do_lower_case": steps.lower}
    (folder / "1_Pooling").mkdir(exist_ok=True)
    files: dict[str, Any] = {"modules.json": modules, "1_Pooling/config.json": pooling, "sentence_bert_config.json": bert_config}
    if steps.prompts:
        prompt_config = {"prompts": dict(steps.prompts), "default_prompt_name": steps.default_prompt, "similarity_fn_name": "cosine"}
        files["config_sentence_transformers.json"] = prompt_config
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
