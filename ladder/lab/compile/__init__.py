"""Compile the ladder's kernels for GPUs that are not there."""
