"""The steps from the vectors of tokens to that of a text, in the small files of sentence-transformers beside a model's weights.

modules.json lists the steps, 1_Pooling/config.json says how token vectors become one, sentence_bert_config.json how many tokens are
read, config_sentence_transformers.json which prompts are put before texts. A step that is not built is an error. Without these
files the result is the mean over all tokens, not normalized.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from argosy.core.errors import BadInput, Damaged, nearest
from argosy.data.tokenizers.config import read_object, read_text

POOLINGS = ("mean", "cls", "max", "last")
# Names of the prompts before queries and before documents; sentence-transformers takes the first that a folder has.
QUERY_PROMPTS, DOCUMENT_PROMPTS = ("query",), ("document", "passage", "corpus")
# Their names in 1_Pooling/config.json.
MODES = {
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "last": "pooling_mode_lasttoken",
}
# Names by `pooling_mode`, where they differ.
SHORT = {"last": "lasttoken"}


@dataclass(frozen=True)
class EmbeddingSteps:
    """pooling: how token vectors become one.
    normalize: scales the result to length 1.
    tokens: the most tokens that are read; None: as many as the model takes.
    lower: whether texts are converted to lower case.
    prompts: texts that are put before texts, by name: `query: ` before queries.
    default_prompt: the name of the prompt of texts for which none is named; None: they have none.
    include_prompt: whether the vectors of a prompt's tokens are pooled too.
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
        """The prompt of texts for which none is named."""
        return self.prompts.get(self.default_prompt or "", "")

    def prompt_named(self, name: str | None) -> str:
        """The prompt of this name; None: that of texts for which none is named.

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
        """The first of these names that a prompt has; None: none has."""
        return next((name for name in names if name in self.prompts), None)


def read_steps(folder: Path, pooling: str | None = None, otherwise: str = "mean") -> EmbeddingSteps:
    """The steps that sentence-transformers would take with this model.

    Args:
        pooling: overrides the folder's.
        otherwise: the pooling where the folder says nothing of it.

    Raises:
        BadInput: a step, or a way to pool, that is not built.
        Damaged: files with invalid contents.
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
    """The steps in modules.json and their folders; none without the file."""
    if not (folder / "modules.json").is_file():
        return []
    try:
        listed = json.loads(read_text(folder / "modules.json", 1 << 20))
        return [(str(module["type"]).rpartition(".")[2], str(module["path"])) for module in listed]
    except (ValueError, TypeError, KeyError):
        raise Damaged("modules.json lists no modules", where=str(folder)) from None


def _pooling(config: Mapping[str, Any], where: str) -> str:
    """The single pooling mode that a Pooling module is set to."""
    modes = [config["pooling_mode"]] if isinstance(config.get("pooling_mode"), str) else []
    modes += [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    matches = [name for name in POOLINGS if name in modes or MODES[name] in modes or SHORT.get(name) in modes]
    if len(modes) != 1 or not matches:
        raise BadInput(f"pooling by {' and '.join(modes) or 'nothing'} is not built", where=where, hint="pass pooling=")
    return matches[0]


def _prompts(config: Mapping[str, Any], where: str) -> tuple[dict[str, str], str | None]:
    """The prompts by name, and the name of the default one. A prompt that is null is an empty text."""
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise Damaged("`prompts` in config_sentence_transformers.json are no texts by name", where=where)
    if default is not None and default not in prompts:
        problem = f"default_prompt_name is `{str(default)[:64]}`, and `prompts` in config_sentence_transformers.json has no such name"
        raise Damaged(problem, where=where)
    return {name: text or "" for name, text in prompts.items()}, default


def trained_steps(objective: Any, data: Any, stored: EmbeddingSteps | None) -> EmbeddingSteps:
    """The steps of a model that was trained with these settings of the objective and of the data. The prompts of training are its
    default prompt, if all texts have the same, otherwise those of queries (anchors) and of documents (positives).

    Args:
        stored: the steps of the model that training started from, whose other prompts are kept.
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
    # Without prompts in training, the stored ones stay as they were.
    pools = stored.include_prompt if stored and not texts else getattr(objective, "include_prompt", True)
    options: dict[str, Any] = {"include_prompt": pools}
    return EmbeddingSteps(objective.text_pooling, True, data.sequence, prompts=prompts, default_prompt=default, **options)


def write_steps(folder: Path, steps: EmbeddingSteps, width: int) -> None:
    """Writes the files that `read_steps` reads, as sentence-transformers does.

    Args:
        width: numbers of a vector.
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
