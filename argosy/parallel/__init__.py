"""Where arrays live. Given trees of logical axes, never modules."""
