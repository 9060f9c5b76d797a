"""`python -m atom` is the `atom` command."""

from atom.entrypoints.terminal.command import run

run()
