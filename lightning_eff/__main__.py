"""`python -m lightning_eff` is the command `lightning-eff`."""

import sys

from lightning_eff.cli import main

if __name__ == "__main__":
    sys.exit(main())
