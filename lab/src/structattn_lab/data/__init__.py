"""Reading data: series from CSV files and corpora of text."""
