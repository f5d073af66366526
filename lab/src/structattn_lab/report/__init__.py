"""Reports of a comparison: a table for the terminal, figures, and one self-contained HTML page.

Everything here reads the records of ``results.json``. Each kind of result has a function ``report``, which
makes a :class:`~structattn_lab.report.report.Report` of its record; :mod:`structattn_lab.report.writer`
writes it. Tables need no matplotlib.
"""
