"""``python -m swift``."""

import sys

from swift.cli import main

sys.exit(main())
