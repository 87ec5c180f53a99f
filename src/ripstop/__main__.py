"""`python -m ripstop`."""

import sys

from ripstop.cli import main

if __name__ == "__main__":
    sys.exit(main())
