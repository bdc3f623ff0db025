"""`python -m lightning_eff` is the command `lightning-eff`."""

from lightning_eff.cli import run

if __name__ == "__main__":
    run()
