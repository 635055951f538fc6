"""Plans for serving a model: memory, time of a step, queues, and the split of a fleet between prefill and decode."""
