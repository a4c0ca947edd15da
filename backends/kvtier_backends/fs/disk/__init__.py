"""The disk: the code that both layouts share."""
