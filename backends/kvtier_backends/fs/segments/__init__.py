"""The layout `segments`: chunks in slots of large preallocated files."""
