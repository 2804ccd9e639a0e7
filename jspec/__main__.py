"""`python -m jspec`: see `jspec.cli`."""

import sys

from jspec.cli import main

if __name__ == "__main__":
    sys.exit(main())
