"""Is attention your bottleneck? ``python -m ladder.profile`` measures, decides by rule, and reads what Nsight Compute wrote."""
