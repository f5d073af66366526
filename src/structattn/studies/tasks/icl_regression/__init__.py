"""Learning a function from examples in the context."""
