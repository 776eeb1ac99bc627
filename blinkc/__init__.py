"""Compile decoder models into bundles that a GPU serves by itself."""

__version__ = "0.1.0"
