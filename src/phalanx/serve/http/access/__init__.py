"""Access to the server: clients' keys, rate limits and admission."""
