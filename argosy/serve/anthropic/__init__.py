"""Anthropic's API: /v1/messages, as a translation to chats and back."""
