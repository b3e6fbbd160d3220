"""Effects of outages of a host's network on a job: a table of docs/reliability.md.

    python scripts/bench/outages.py [--launcher ssh] [--backend ccl] [--timeout 30] [--outage 25]

Needs root, sshd and ip, for a cluster of hosts in network namespaces (docs/clusters.md); srun needs a Slurm.
All 80 cells take 90 minutes, most of which is waiting.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "tests"))

from support.outages import main

sys.exit(main())
