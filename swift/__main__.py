"""The entry point of ``python -m swift``."""

import os
import sys

from swift.cli import main
from swift.errors import INTERRUPTED

if __name__ == "__main__":
    code = main()
    if code == INTERRUPTED:
        # A normal exit would wait for background compilation, which cannot be interrupted.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
