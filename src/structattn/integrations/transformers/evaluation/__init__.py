"""What a cache loses and costs: loss, retrieval, bytes and time of a model that decodes through it."""
