"""Grouped expert compute, dispatchers and the MoE layer."""
