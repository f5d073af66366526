"""Reports of a comparison: a table for the terminal, figures, and one self-contained HTML page.

Everything here reads the plain dict that ``results.json`` holds. Only :mod:`structattn.studies.report.figures` needs
matplotlib; the table and the page are written without it.
"""
