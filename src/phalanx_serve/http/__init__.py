"""OpenAI's HTTP interface over engines: requests read and refused, admitted, streamed, and given up."""
