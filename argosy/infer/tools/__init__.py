"""Tool calls, channels and grammars: constrains completions to a structure, and parses the structure of completions."""
