"""The forward pass of a model, over the steps of an engine and over whole sequences."""
