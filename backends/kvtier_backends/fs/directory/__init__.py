"""The directory of a tier, as commands see it."""
