"""`python -m scheduler_svc`: run the scheduler, or a standby."""

import sys

from scheduler_svc.service import serve
from wire.service import parse_assignments, run

if __name__ == "__main__":
    sys.exit(run("scheduler", serve, parse_assignments(sys.argv[1:])))
