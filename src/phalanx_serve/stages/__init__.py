"""One model in several processes: pipeline stages with some layers each, or tensor-parallel shares of each layer."""
