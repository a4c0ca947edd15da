"""KV caches: how tensors lie in memory, and copies between them and rows. Needs torch."""
