"""The front door: the command line, and the whole stack on one machine."""
