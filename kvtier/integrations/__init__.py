"""Integrations into LLM engines: one package each, the only places that import them."""
