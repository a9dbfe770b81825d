"""Hub folders and training state on disk."""
