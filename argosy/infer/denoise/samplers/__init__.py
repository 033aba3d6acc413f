"""Sampling methods, a file a family: each makes a `SamplingPlan` of its settings and a number of steps.

    method(settings, steps, positions=None, strength=1.0) -> SamplingPlan

positions: of the network for one image; shifts that depend on the size of the image read it. strength: the share of the steps that is
taken, the last ones; below 1 an image is begun from (image to image). To add one: a file here, and its line in `settings.SAMPLERS`.
"""
