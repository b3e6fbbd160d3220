"""Faults of jobs, and their results: runs the table of docs/reliability.md.

    python scripts/chaos.py [--rounds N] [--launcher ssh] [--only "link cut"]
    python scripts/chaos.py --restarts [--blows 50] [--backend gloo]

With --restarts, processes of one training job are killed 50 times, and the job must end with the weights of
an undisturbed run.

Needs root, sshd and ip, for a cluster of four hosts in network namespaces; see docs/clusters.md.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.chaos import main

sys.exit(main())
