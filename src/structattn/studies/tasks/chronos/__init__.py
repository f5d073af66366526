"""Chronos forecasters with structured attention."""
