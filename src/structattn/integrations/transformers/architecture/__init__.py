"""Our own architecture for transformers, and what all our model classes have in common."""
