"""`python -m pdq` is the `pdq` command."""

import sys

from pdq.cli import main

if __name__ == "__main__":
    sys.exit(main())
