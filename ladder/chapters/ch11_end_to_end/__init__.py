"""Chapter 11: a model served end to end."""
