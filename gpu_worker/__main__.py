"""`python -m gpu_worker [--set NAME=VALUE …]`: the worker as a process of its own."""

from __future__ import annotations

import sys

from gpu_worker.service import serve
from wire.service import parse_assignments, run


def main() -> int:
    """Serve until a signal; returns the exit code."""
    return run("worker", serve, parse_assignments(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
