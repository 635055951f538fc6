"""What exact serving relies on, tried on the machine at hand."""
