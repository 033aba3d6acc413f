"""From batches to better weights: objectives, optimizers, the step, the loop."""
