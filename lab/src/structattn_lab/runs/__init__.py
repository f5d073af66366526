"""What a run needs of the machine: its output folder with an owner and a lock, and requests to stop."""
