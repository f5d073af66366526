"""``python -m structattn.cli``, the same as ``structattn``."""

import sys

from structattn.cli import main

sys.exit(main())
