"""Servers on other machines: manifests of Kubernetes and KServe, and replicas on Ray Serve."""
