"""The shared parts of policy-gradient algorithms: settings, losses, KL penalty, importance weights, critic."""
