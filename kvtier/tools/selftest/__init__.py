"""The self-test: whether every byte comes back from this machine's device, how fast, and what a hit saves."""
