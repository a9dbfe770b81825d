"""Cache and generation."""
