"""Reads and writes models in the formats of the Hub: config.json and tensor names. Each family has a file."""
