"""From rewards to advantages: comparisons within groups and over batches, by turn, and against a critic."""
