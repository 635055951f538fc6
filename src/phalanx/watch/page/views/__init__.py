"""What each address of the page answers: plain functions from a run and the request's parameters to a value for JSON."""
