"""Load and speed of servers and engines: what `atom bench` runs."""
