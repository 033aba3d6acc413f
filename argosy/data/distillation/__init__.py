"""Data of distillation: rows in the tokens of two tokenizers, and a cache of a teacher's most likely tokens."""
