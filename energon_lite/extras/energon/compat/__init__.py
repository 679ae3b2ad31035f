"""Energon's modules and names over ours: what stands where under ``megatron.energon``."""
