"""``python -I -S …/run_merge.py``: merges the traces of ranks in this directory, as stdin says in JSON.

A process of its own, because it may take seconds and much memory, which the launcher has neither of.
"""

import os
import sys

sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from cpulaunch.trace.files import main

sys.exit(main())
