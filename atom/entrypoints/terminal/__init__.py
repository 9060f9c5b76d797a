"""The `atom` command and what it runs in a terminal."""
