"""What rollouts are learned by: rewards, or the distributions of a teacher."""
