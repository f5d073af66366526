"""Tasks: the data, the loss, the evaluation and the baselines of each experiment."""
