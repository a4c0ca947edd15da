"""Chunks in slots of large preallocated files: for chunks too small to be worth a file each."""
