"""Layout, mesh, collectives, parallel layers and gradients."""
