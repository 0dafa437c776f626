"""``python -m swift``."""

import os
import sys

from swift.cli import main
from swift.errors import INTERRUPTED

if __name__ == "__main__":
    code = main()
    if code == INTERRUPTED:
        # In peace it would wait for what is compiled in the background, which cannot be interrupted.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
