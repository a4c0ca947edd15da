"""The layout `files`: one file a chunk."""
