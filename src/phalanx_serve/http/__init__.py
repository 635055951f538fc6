"""OpenAI's HTTP interface: parsing, admission, streaming and cancellation of requests."""
