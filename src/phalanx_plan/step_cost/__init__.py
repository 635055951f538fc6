"""The cost of one step: kernels, collectives, bubbles, memory and time of a layout."""
