"""Kernels in CuTe-DSL, one class each. Only ``export`` imports the modules that need the DSL; ``registry`` does not."""
