"""Who leads a run: claims, reigns and their journals, candidates, and the lead that a coordinator keeps."""
