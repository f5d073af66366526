"""Models of transformers whose sequences are divided among processes."""
