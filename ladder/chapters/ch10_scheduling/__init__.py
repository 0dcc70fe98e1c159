"""Chapter 10: experts on their devices."""
