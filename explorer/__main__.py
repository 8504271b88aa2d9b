"""`python -m tracefuse`: the command line without its script."""

import sys

from tracefuse.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
