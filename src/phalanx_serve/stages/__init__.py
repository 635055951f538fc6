"""One model in several processes: each has some of its layers, and a row goes through all of them, or a share of each layer."""
