"""``python -m structattn``, the same as the command ``structattn``."""

from structattn.cli.__main__ import run

if __name__ == "__main__":
    run()
