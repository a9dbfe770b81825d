"""Memory, traffic and time of a layout, and the search for one."""
