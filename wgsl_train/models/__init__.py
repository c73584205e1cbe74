"""Models: forward passes only."""
