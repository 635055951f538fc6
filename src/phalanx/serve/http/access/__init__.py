"""Who may ask, and what is taken on: clients' keys and admission."""
