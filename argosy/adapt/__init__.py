"""Functions from model to model, applied to weights from outside: no model file knows of them."""
