"""`python -m gpu_worker [--set NAME=VALUE …]`: the worker as a process of its own."""

from __future__ import annotations

import os
import sys

from wire.service import parse_assignments, run


def main() -> int:
    """Serve until a signal; returns the exit code."""
    # Threads that share an operation wait for one another. By default they spin, and where the
    # cores are not theirs alone, they so keep those off the core that they are waiting for.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from gpu_worker.service import serve  # noqa: PLC0415 - torch reads the variable when it loads

    return run("worker", serve, parse_assignments(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
