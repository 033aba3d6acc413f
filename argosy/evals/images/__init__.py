"""Evaluation of images that a model drew, beside those it was trained on and those that were held out."""
