"""The benchmarks that the recorded results come from: ``python -m ladder.bench NAME``."""
