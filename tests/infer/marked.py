"""Chat templates with tools, and tokenizers of bytes that have the marks of all notations as special tokens."""

import json
from collections.abc import Sequence
from pathlib import Path

from helpers import shared

from argosy.data.tokenizers import Tokenizer
from argosy.data.tokenizers.byte import tokenizer_json
from argosy.data.tokenizers.load import load_tokenizer
from argosy.infer.tools.notations import NOTATIONS
from argosy.infer.tools.notations.gpt_oss import GptOssNotation

VOCAB = 288
# The ways of Mistral's tokenizers from v11 on; the template of v3 (Nemo) and that of Kimi K2 are in the shared data.
TOOLS = "{% for t in tools or [] %}[AVAILABLE_TOOLS]{{ t.function.name }}[/AVAILABLE_TOOLS]{% endfor %}"
LATER = (
    "{{% for m in messages %}}{{% if m.role == 'user' %}}[INST]{{{{ m.content }}}}[/INST]{{% else %}}{{{{ m.content }}}}"
    "{{% for c in m.tool_calls or [] %}}[TOOL_CALLS]{{{{ c.function.name }}}}{}{{{{ c.function.arguments | tojson }}}}{{% endfor %}}"
    "<eos>{{% endif %}}{{% endfor %}}"
)
V11, V13 = (TOOLS + LATER.format(mark) for mark in ("[CALL_ID]{{ c.id }}[ARGS]", "[ARGS]"))
FILES = {
    "nemo": "mistralai-Mistral-Nemo-Instruct-2407",
    "kimi": "Kimi-K2-Instruct",
    "gemma": "google-gemma-4-31B-it",
    "deepseek": "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "qwen": "Qwen-Qwen2.5-7B-Instruct",
    "qwen3.5": "Qwen3.5-4B",
    "llama": "meta-llama-Llama-3.1-8B-Instruct",
}
NAMES = sorted({name for notation in NOTATIONS if notation is not GptOssNotation for name in notation.names})


def template(name: str) -> str:
    return {"v11": V11, "v13": V13}.get(name) or shared(f"chat_templates/{FILES[name]}.jinja").read_text()


def tokenizer_with_marks(folder: Path, names: Sequence[str], template: str, eos: str = "<eos>") -> Tokenizer:
    """Bytes, `<bos>` 256, `<eos>` 257, and from 258 on the names."""
    content = json.loads(tokenizer_json())
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"] += [{"id": 258 + i, "content": name, "special": True} | plain for i, name in enumerate(names)]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos, "bos_token": "<bos>"}))
    (folder / "chat_template.jinja").write_text(template)
    return load_tokenizer(str(folder))
