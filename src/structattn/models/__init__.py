"""Models of the tasks, all around the one attention module."""
