"""`python -m pooled_mlx`."""

import sys

from pooled_mlx.cli import main

if __name__ == "__main__":
    sys.exit(main())
