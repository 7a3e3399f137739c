"""`python -m automodel_c`: the command line."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
