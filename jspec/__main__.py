"""`python -m jspec`: see `jspec.cli`."""

from jspec.cli import command

if __name__ == "__main__":
    command()
