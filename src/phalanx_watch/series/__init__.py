"""A run's numbers over time: read as they are appended, kept in compact columns, and drawn in as many points as a picture has pixels."""
