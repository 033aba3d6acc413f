"""Adapters, quantization and rotations: functions that change a model from outside. No model file knows of them."""
