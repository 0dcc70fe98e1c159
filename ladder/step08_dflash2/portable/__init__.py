"""Step 08's kernels for every other device, in Triton, which its interpreter runs too."""
