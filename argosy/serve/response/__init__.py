"""From the tokens of an engine to the text, thoughts and tool calls of a response."""
