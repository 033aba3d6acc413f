"""Evaluation on files of the user: perplexity, multiple choice, generation with exact match, IFEval, sentence vectors and images."""
