"""Denoisers, one file a family: from noisy images or latents to what an image is computed from."""
