"""Anthropic's API: /v1/messages, translated to chat requests and back."""
