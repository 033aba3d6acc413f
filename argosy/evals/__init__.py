"""Evaluation: perplexity, multiple choice, generation with exact match, and IFEval's checks, on files that the user brings."""
