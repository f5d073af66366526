"""What finished runs do: forecasts and text."""
