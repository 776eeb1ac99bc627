"""Shapes, graph keys, look-up tables, arena and memory sums."""
