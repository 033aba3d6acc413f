"""Renders and encodes conversations with the chat template of a model."""
