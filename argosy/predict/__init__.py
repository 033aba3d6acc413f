"""A server of bundles: versions of many models, batches of requests, the Open Inference Protocol.

`argosy predict REPOSITORY`. Imports neither flax nor models: what it runs is in the bundles.
"""
