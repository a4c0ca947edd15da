"""Where kvtier is embedded in other engines: one package each, the only places that import them."""
