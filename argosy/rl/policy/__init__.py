"""What algorithms of reinforcement learning share."""
