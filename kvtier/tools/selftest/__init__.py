"""The self-test: does every byte come back from this machine's device, in order, and how fast."""
