"""Serve a bundle: load it, start its scheduler, answer requests."""

__version__ = "0.1.0"
