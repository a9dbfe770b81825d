"""Data, loop, optimisers, metrics and report."""
