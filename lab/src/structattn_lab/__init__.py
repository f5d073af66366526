"""structattn-lab: tasks, training, comparisons, sweeps, planning and reports for the attention variants of
structattn.
"""
