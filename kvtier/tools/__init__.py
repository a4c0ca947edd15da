"""Tools for people: the command line, its replays, benchmarks, and commands over a tier's directory."""
