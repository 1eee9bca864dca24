"""Exact attention for JAX on NVIDIA Blackwell and Hopper."""

from jax_fa_blackwell.attention import flash_attention

__all__ = ["flash_attention"]
