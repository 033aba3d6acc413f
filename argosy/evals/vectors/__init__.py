"""Vectors of texts, measured on pairs with scores, pairs with labels, and searches of a corpus."""
