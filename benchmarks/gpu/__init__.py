"""Everything that is worth an hour on a GPU, in one command: ``python -m benchmarks.gpu``."""
