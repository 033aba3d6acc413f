"""Sampling methods, one file for each family. A method makes a `SamplingPlan` from its settings and a number of steps.

    method(settings, steps, positions=None, strength=1.0) -> SamplingPlan

positions: the number of tokens of one image in the network, for shifts that depend on the image size.
strength: the share of the steps that are run, the last ones. Below 1, sampling begins from an image (image to image).

A new method is a file here, and a line in `settings.SAMPLERS`.
"""
