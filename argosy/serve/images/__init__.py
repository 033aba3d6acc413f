"""A server of images: OpenAI's /v1/images, and a page to draw with."""
