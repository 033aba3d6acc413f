"""Reads the configuration beside a vocabulary: special tokens by role, whether a text begins with one, and chat templates.

It comes from four places (tokenizer_config.json, special_tokens_map.json, chat_template.jinja, the keys of a GGUF file), and is written
as one tokenizer_config.json. File sizes are checked before anything is parsed. `auto_map` is ignored, so that no code is imported. The
text of a role has an id only if it is in the vocabulary, which is read elsewhere.
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
# A JSON escape of a surrogate. Two of them are one character.
HALF = re.compile(r"\\u[dD][89a-fA-F]")
LONE = re.compile("[\ud800-\udfff]")
# The name of a chat template without a name.
DEFAULT = "default"


@dataclass(frozen=True)
class TokenizerConfig:
    """The configuration beside a vocabulary.

    roles: the text of each special token, by role.
    adds_bos: whether a text begins with the beginning-of-sequence token; None: no file tells.
    templates: the chat templates, by name.
    added: the added tokens, as in `added_tokens_decoder`, by id.
    more: the texts of special tokens without a role.
    raw: the whole content of tokenizer_config.json.
    """

    roles: Mapping[str, str] = field(default_factory=dict)
    adds_bos: bool | None = None
    templates: Mapping[str, str] = field(default_factory=dict)
    added: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    more: tuple[str, ...] = ()
    raw: Mapping[str, Any] = field(default_factory=dict)

    def filled(self, roles: Mapping[str, str]) -> "TokenizerConfig":
        """A copy of the config in which missing roles have these texts."""
        return replace(self, roles={**roles, **self.roles})

    def save(self, folder: Path, adds_bos: bool, kind: str = "PreTrainedTokenizerFast") -> None:
        """Writes a tokenizer_config.json that readers of Hub folders understand.

        Args:
            adds_bos: whether a text begins with the beginning-of-sequence token.
            kind: the `tokenizer_class`, if the config has none.
        """
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
    """Reads the config of a Hub folder. It is empty if the folder has none of the files.

    Raises:
        Damaged: a file is not JSON, or not an object of the expected form.
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
    """The text of each role. In the config, it is a text, or an object with the text as `content`."""
    texts = {}
    for role in ROLES:
        text = config.get(role)
        text = text.get("content") if isinstance(text, dict) else text
        if isinstance(text, str) and text:
            texts[role] = text
    return texts


def more_of(config: Mapping[str, Any]) -> list[str]:
    """The texts of special tokens without a role, from the lists `additional_special_tokens` and `extra_special_tokens`."""
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
    """Reads the added tokens, by id: from the older added_tokens.json, and from `added_tokens_decoder` of the config, which takes
    precedence."""
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
    """Reads the chat templates, by name. A template in a separate file takes precedence over the config."""
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
    """Reads a JSON object from a file; empty if there is no such file."""
    return parse_object(read_text(path, CONFIG_BYTES), path) if path.is_file() else {}


def parse_object(text: str, path: Path) -> dict[str, Any]:
    """Parses a JSON object.

    Raises:
        Damaged: the text is no JSON object, or holds half of a surrogate pair.
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
    """Reads a file of at most `most` bytes.

    Raises:
        BadInput: the file cannot be read.
        Damaged: the file is larger.
    """
    try:
        with path.open("rb") as file:
            # `read` allocates as much as it is asked for, so the size of the file is passed.
            data = file.read(min(os.fstat(file.fileno()).st_size, most) + 1)
    except OSError as error:
        raise BadInput(f"cannot read `{path}`: {(error.strerror or str(error)).lower()}") from None
    if len(data) > most:
        raise damaged_file_error(path, f"more than {most >> 20} MB")
    return data


def read_text(path: Path, most: int = VOCABULARY_BYTES) -> str:
    """Reads a file of at most `most` bytes as UTF-8."""
    try:
        return read_bytes(path, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise damaged_file_error(path, f"byte {error.start} is not UTF-8") from None


def damaged_file_error(path: Path, problem: str) -> Damaged:
    """The error for a tokenizer file that contradicts itself."""
    return Damaged(f"`{path.name}` is damaged: {problem}", where=f"in {path}", hint="copy or download it again")
