"""The files beside a vocabulary: special tokens by role, whether a text begins with one, chat templates.

They come from four places (tokenizer_config.json, special_tokens_map.json, chat_template.jinja, a GGUF's keys) and are
written as one tokenizer_config.json. Sizes are checked before anything is parsed, and `auto_map` imports nothing. A role's
text has an id only if the vocabulary, which is read elsewhere, gives it one.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from argosy.core.errors import BadInput, Damaged

# The largest published tokenizer.json has 33 MB.
VOCABULARY_BYTES = 256 << 20
CONFIG_BYTES = 16 << 20
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# An escape of half a character; JSON joins two of them to one.
HALF = re.compile(r"\\u[dD][89a-fA-F]")
LONE = re.compile("[\ud800-\udfff]")
# The name of a chat template without a name.
DEFAULT = "default"


@dataclass(frozen=True)
class TokenizerConfig:
    """The configuration beside a vocabulary.

    roles: text of each special token.
    adds_bos: whether a text begins with the beginning-of-sequence token; None if no file says.
    templates: chat templates by name.
    added: tokens beside the vocabulary, by id.
    more: special tokens without a role.
    raw: the whole tokenizer_config.json.
    """

    roles: Mapping[str, str] = field(default_factory=dict)
    adds_bos: bool | None = None
    templates: Mapping[str, str] = field(default_factory=dict)
    added: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    more: tuple[str, ...] = ()
    raw: Mapping[str, Any] = field(default_factory=dict)

    def filled(self, roles: Mapping[str, str]) -> "TokenizerConfig":
        """The same config, with these texts for the roles that it leaves out."""
        return replace(self, roles={**roles, **self.roles})

    def save(self, folder: Path, adds_bos: bool, kind: str = "PreTrainedTokenizerFast") -> None:
        """Writes tokenizer_config.json as the Hub's readers expect it; `kind` is its class if the config names none."""
        config = {"tokenizer_class": kind} | dict(self.raw) | dict(self.roles)
        config["add_bos_token"] = adds_bos
        if self.added:
            config["added_tokens_decoder"] = {str(number): dict(token) for number, token in self.added.items()}
        if self.more:
            config["additional_special_tokens"] = list(self.more)
        config.pop("chat_template", None)
        if set(self.templates) == {DEFAULT}:
            config["chat_template"] = self.templates[DEFAULT]
        elif self.templates:
            config["chat_template"] = [{"name": name, "template": text} for name, text in self.templates.items()]
        text = json.dumps(config, indent=1, ensure_ascii=False)
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8", errors="surrogatepass")


def read_config(folder: Path) -> TokenizerConfig:
    """The config of a Hub folder; empty where it has none of the files.

    Raises:
        Damaged: a file that is not JSON, or not an object of the expected shape.
    """
    config = read_object(folder / "tokenizer_config.json")
    special_map = read_object(folder / "special_tokens_map.json")
    roles, more = texts_of(special_map) | texts_of(config), dict.fromkeys([*more_of(special_map), *more_of(config)])
    adds = config.get("add_bos_token")
    adds_bos = adds if isinstance(adds, bool) else None
    return TokenizerConfig(
        roles, adds_bos, read_templates(folder, config), read_added(folder, config), tuple(more), config
    )


def texts_of(config: Mapping[str, Any]) -> dict[str, str]:
    """The text of each role, which is given directly or as the `content` of an object."""
    texts = {}
    for role in ROLES:
        text = config.get(role)
        text = text.get("content") if isinstance(text, dict) else text
        if isinstance(text, str) and text:
            texts[role] = text
    return texts


def more_of(config: Mapping[str, Any]) -> list[str]:
    """Special tokens without a role, under the old and the new name of their list."""
    lists = [config.get("additional_special_tokens"), config.get("extra_special_tokens")]
    entries = [
        entry
        for group in lists
        if isinstance(group, list | dict)
        for entry in (group.values() if isinstance(group, dict) else group)
    ]
    texts = [entry.get("content") if isinstance(entry, dict) else entry for entry in entries]
    return [text for text in texts if isinstance(text, str) and text]


def read_added(folder: Path, config: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Tokens beside the vocabulary: `added_tokens_decoder` of the config, or the older added_tokens.json."""
    added: dict[int, dict[str, Any]] = {}
    for text, number in read_object(folder / "added_tokens.json").items():
        if isinstance(number, int) and text:
            added[number] = {"content": text, "special": False}
    decoder = config.get("added_tokens_decoder")
    for number, token in decoder.items() if isinstance(decoder, dict) else ():
        content = token.get("content") if isinstance(token, dict) else None
        if not (number.isascii() and number.isdigit() and len(number) < 10 and isinstance(content, str) and content):
            raise damaged_file_error(folder / "tokenizer_config.json", "an entry of `added_tokens_decoder` is not a token")
        added[int(number)] = {"content": content} | {
            flag: bool(token.get(flag)) for flag in ("single_word", "lstrip", "rstrip", "normalized", "special")
        }
    return added


def read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name. A template in a file of its own takes precedence over the config."""
    templates: dict[str, str] = {}
    inside = config.get("chat_template", read_object(folder / "chat_template.json").get("chat_template"))
    if isinstance(inside, str):
        templates[DEFAULT] = inside
    elif isinstance(inside, dict):
        templates |= {name: text for name, text in inside.items() if isinstance(text, str)}
    for entry in inside if isinstance(inside, list) else ():
        if not (
            isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
        ):
            raise damaged_file_error(folder / "tokenizer_config.json", "an entry of `chat_template` has no name or no template")
        templates[entry["name"]] = entry["template"]
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = read_text(path, CONFIG_BYTES)
    if (folder / "chat_template.jinja").is_file():
        templates[DEFAULT] = read_text(folder / "chat_template.jinja", CONFIG_BYTES)
    return templates


def read_object(path: Path) -> dict[str, Any]:
    """A file's JSON object; empty where there is no such file."""
    return parse_object(read_text(path, CONFIG_BYTES), path) if path.is_file() else {}


def parse_object(text: str, path: Path) -> dict[str, Any]:
    """Parses a JSON object.

    Raises:
        Damaged: it is not one.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged_file_error(path, f"not JSON: {str(error)[:120]}") from None
    if not isinstance(value, dict):
        raise damaged_file_error(path, "not a JSON object")
    if HALF.search(text) and LONE.search(json.dumps(value, ensure_ascii=False)):
        raise damaged_file_error(path, "half a character: an escape of UTF-16 that stands alone")
    return value


def read_bytes(path: Path, most: int = VOCABULARY_BYTES) -> bytes:
    """A file of bounded size.

    Raises:
        BadInput: it cannot be read.
        Damaged: it is larger than any of its kind.
    """
    try:
        with path.open("rb") as file:
            # A read allocates what it is asked for, so it is asked for no more than the file holds.
            data = file.read(min(os.fstat(file.fileno()).st_size, most) + 1)
    except OSError as error:
        raise BadInput(f"cannot read `{path}`: {(error.strerror or str(error)).lower()}") from None
    if len(data) > most:
        raise damaged_file_error(path, f"more than {most >> 20} MB")
    return data


def read_text(path: Path, most: int = VOCABULARY_BYTES) -> str:
    """A file of bounded size, as UTF-8."""
    try:
        return read_bytes(path, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise damaged_file_error(path, f"byte {error.start} is not UTF-8") from None


def damaged_file_error(path: Path, problem: str) -> Damaged:
    """The error for a tokenizer file that contradicts itself."""
    return Damaged(f"`{path.name}` is damaged: {problem}", where=f"in {path}", hint="copy or download it again")
