"""Draws images from noise: samplers as tables of coefficients (`plan`, `samplers`), guidance, and diffusers' settings of both
(`hub`)."""
