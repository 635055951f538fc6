"""Output for people: the HTML page with its charts, and the trace of a step."""
