"""Instructions that a program can check (IFEval): the checks, and the accuracies over them."""
