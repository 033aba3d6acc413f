"""Evaluates images that a model has generated, in comparison with training images and held-out images."""
