"""What befalls jobs, and what becomes of them: the table of docs/reliability.md, run for real.

    python scripts/chaos.py [--rounds N] [--launcher ssh] [--only "link cut"]
    python scripts/chaos.py --restarts [--blows 50] [--backend gloo]

With --restarts, one training job is struck down 50 times, and must end with the weights of a calm run.

Needs root, sshd and ip, for a cluster of four hosts in network namespaces; see docs/clusters.md.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.chaos import main

sys.exit(main())
