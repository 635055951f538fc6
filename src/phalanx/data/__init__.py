"""Text to training samples: sample *i* of a run is a pure function of the dataset, the seed and *i*."""
