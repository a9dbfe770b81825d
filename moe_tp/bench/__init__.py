"""Measuring: times over what the hardware can do at best, and a profile for the planner."""
