"""Converts the tokens of an engine to the text, reasoning and tool calls of a response."""
