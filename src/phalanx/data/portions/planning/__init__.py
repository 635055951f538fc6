"""What is prepared: recipes and named files, cut into portions."""
