"""The first life of a model, act by act."""
