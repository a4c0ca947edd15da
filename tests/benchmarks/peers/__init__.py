"""Others' ways to do the same, each in an environment of its own: nothing here is part of what is installed."""
