"""Episodes: completions of several turns, some of which an environment writes."""
