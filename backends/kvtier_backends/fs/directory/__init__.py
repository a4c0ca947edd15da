"""A tier's directory, as the commands see it."""
