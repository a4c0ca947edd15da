"""The engine decides: one thread, all state, no I/O."""
