"""Kubernetes as an engine: manifests of a run, its pods, and the cluster through kubectl."""
