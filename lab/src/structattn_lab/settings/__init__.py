"""The settings of the lab as values: of a run, of a comparison, their files and their changes."""
