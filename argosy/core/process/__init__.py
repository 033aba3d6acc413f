"""This process and its children: signals, streams, memory, messages."""
