"""Models on the Hub: config.json and the names of tensors, a file a family."""
