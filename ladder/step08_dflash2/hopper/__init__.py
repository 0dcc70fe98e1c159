"""Step 08 for compute capability 9.0: the host code of its kernels, which imports no Triton before a launch, and the
kernels, in Gluon."""
