"""Chapter 09: profile and decide."""
