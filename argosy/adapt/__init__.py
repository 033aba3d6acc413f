"""From model to model: what is done to weights from outside, without a model file knowing."""
