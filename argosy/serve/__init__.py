"""A model as a service: an HTTP server with OpenAI's API, on the engine of `infer`."""
