"""Plan a preparation: recipes and named files, divided into portions."""
