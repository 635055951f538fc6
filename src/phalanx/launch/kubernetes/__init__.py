"""Kubernetes as an engine: manifests of a run, what its pods do, and the cluster asked through kubectl."""
