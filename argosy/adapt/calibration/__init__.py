"""Calibration: statistics of the inputs of contractions, layer by layer, and quantization by them."""
