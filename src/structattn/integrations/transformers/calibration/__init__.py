"""What a trained model's activations say about which dimensions of its heads far tokens need, and which ranks
fit a budget.
"""
