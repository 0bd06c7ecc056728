"""Collecting traffic, turning it into chunks of graphs, and reading them while training."""
