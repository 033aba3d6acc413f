"""What calibration data tells of the inputs of contractions, layer by layer."""
