"""The runner does what the engine decides: on the loop, in a thread, or in a process of its own."""
