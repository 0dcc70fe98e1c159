"""Chapter 08: DFlash v2."""
