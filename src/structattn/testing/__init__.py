"""Shipped test helpers: the tolerance table and the inherited test case of structured matrices."""
