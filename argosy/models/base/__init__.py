"""The config of every model, and of those that predict tokens: what it says of itself, and the table of its names on the Hub."""
