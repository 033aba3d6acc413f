"""Data of distillation: rows in two vocabularies, and a teacher's likeliest tokens."""
