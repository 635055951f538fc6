"""A run's numbers for outside eyes: Prometheus' text formats, the endpoint that serves them, and what they are taken from."""
