"""The training loop on accelerate, and its checkpoints."""
