"""Chapters 06 and 07: pages, splits, and what an MoE server runs."""
