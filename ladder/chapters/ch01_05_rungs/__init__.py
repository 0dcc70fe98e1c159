"""Chapters 01 to 05: from the formula to one fused kernel."""
