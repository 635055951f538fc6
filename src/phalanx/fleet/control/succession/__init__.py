"""Leadership of a run: claims, reigns and their journals, candidates, and leader election."""
