"""Base classes of model configs: for models of any kind, and for models that read tokens."""
