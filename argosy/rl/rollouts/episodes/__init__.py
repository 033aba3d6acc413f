"""Episodes: completions of several turns, of which an environment writes some."""
