"""What a training run and a cache will take, before it begins."""
