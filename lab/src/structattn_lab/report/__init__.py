"""Reports of a comparison: a table for the terminal, figures, and one self-contained HTML page.

Everything here reads the records of ``results.json``. Only :mod:`structattn_lab.report.figures` needs
matplotlib; the table and the page are written without it.
"""
