"""`python -m argosy` is `argosy`."""

import sys

from argosy.cli import main

if __name__ == "__main__":
    sys.exit(main())
