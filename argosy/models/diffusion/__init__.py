"""Denoisers, one file for each family. A denoiser maps noisy images or latents to a prediction, such as the noise or the velocity."""
