"""Speculative decoding: drafters, and the verification of drafts."""
