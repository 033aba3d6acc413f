"""Autoencoders of images, one file a family: from pixels to latents, and back."""
