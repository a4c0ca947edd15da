"""Commands over a tier's directory: verify, du, ls, prune. Beside an engine that may be using it, or without one."""
