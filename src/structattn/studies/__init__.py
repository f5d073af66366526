"""Recipes (which settings) and the comparison that runs them."""
