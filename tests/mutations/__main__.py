"""The command line: `python -m tests.mutations`."""

import sys

from tests.mutations import MUTATIONS
from tests.mutations.trial import main

sys.exit(main(MUTATIONS, sys.argv[1:]))
