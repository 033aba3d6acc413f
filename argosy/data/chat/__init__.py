"""Conversations as text and tokens, by the chat template of a model."""
