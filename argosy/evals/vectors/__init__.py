"""Evaluates vectors of texts on pairs with scores, pairs with labels, and searches of a corpus."""
