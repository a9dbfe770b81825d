"""Attention over sequences that the ranks of cp share: head exchange (Ulysses) and ring."""
