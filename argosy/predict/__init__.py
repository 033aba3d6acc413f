"""A server of bundles (`argosy predict REPOSITORY`): versions of many models, batching of requests, the Open Inference Protocol.

It imports neither flax nor models, because the programs that it runs are in the bundles.
"""
