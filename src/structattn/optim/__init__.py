"""Parameter roles and what follows from them: initial scales and learning rates."""
