"""The nearest structured matrix to a dense one."""
