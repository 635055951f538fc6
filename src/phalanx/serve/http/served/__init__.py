"""What is served: a run's weights in an engine, and its words."""
