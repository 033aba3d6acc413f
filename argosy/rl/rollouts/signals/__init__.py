"""The training signals of rollouts: rewards, or the distributions of a teacher."""
