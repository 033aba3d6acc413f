"""Calibration: computes statistics of the inputs of contractions on data, layer by layer, and quantizes with them."""
