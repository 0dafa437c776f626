"""The entry point of ``swift-moe``, apart from ``swift``, of which there may be another one.

Other packages, such as ms-swift, install a top-level ``swift``, too: of the two that which was installed last has
overwritten files of the other.
"""

import importlib
import os
import sys

DISTRIBUTION = "swift-moe"
ADVICE = "install swift-moe into an environment of its own, without ms-swift or others that have a module `swift`"


def main() -> None:
    """Runs the command line, and ends the process; refuses in one line if ``swift`` is another package's."""
    sys.path.append(os.getcwd())  # modules that a gin file imports lie there; last, so that they hide nobody else's
    strange = _strange()
    if strange is not None:
        sys.exit(f"swift-moe: {strange}; {ADVICE}")
    importlib.import_module("swift.__main__").run()


def _strange() -> str | None:
    """Returns what is wrong if the ``swift`` that Python finds is not that of this package."""
    try:
        swift = importlib.import_module("swift")
    except Exception as error:  # of any kind: it is not our module
        return f"`import swift` fails: {error}"
    if getattr(swift, "DISTRIBUTION", None) == DISTRIBUTION:
        return None
    return f"{getattr(swift, '__file__', None) or swift} belongs to another package"
