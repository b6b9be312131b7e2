"""The ``specgov`` command; each subcommand is one file."""
