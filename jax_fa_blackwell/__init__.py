"""Exact attention for JAX on NVIDIA Blackwell and Hopper."""
