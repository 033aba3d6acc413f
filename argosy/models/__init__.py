"""Model families, one file each: config, module, names on the Hub. A family registers with one line here, or from outside."""

from argosy.core.registry import Registry

FAMILIES = Registry("model family")
FAMILIES.add("llama", "argosy.models.llama:LlamaConfig")
