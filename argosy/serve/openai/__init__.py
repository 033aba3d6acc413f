"""OpenAI's API: the routes, their fields and their responses."""
