"""Bridges to other libraries. Each is imported by its own name, and only it needs that library."""
