"""The entry point of ``python -m swift``."""

import os
import sys
from typing import NoReturn


def run() -> NoReturn:
    """Runs the command line and exits with its code."""
    from swift.output import finish, open_closed

    open_closed()
    from swift.cli.main import main
    from swift.errors import INTERRUPTED

    try:
        code = main()
    finally:
        finish()
    if code == INTERRUPTED:
        # A normal exit would wait for a background compilation, which cannot be interrupted.
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    try:
        from swift import DISTRIBUTION  # noqa: F401 - which no other package's `swift` has
    except ImportError:
        import swift
        import swift_moe

        sys.exit(f"swift: {swift.__file__} belongs to another package than swift-moe; {swift_moe.ADVICE}")
    run()
