"""Before the first step: mistakes that need no model, and the weights that a run begins with."""
