"""A ladder of attention kernels: every rung one idea above the last, each proven equal to the one before."""

__version__ = "0.1.0"
