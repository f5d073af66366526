"""What the commands `compare`, `fit`, `mup check` and `uptrain` do: train or compute, write records and a
report.
"""
