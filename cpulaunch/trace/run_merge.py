"""The program ``python -I -S …/run_merge.py``, which merges traces for the launcher.

It is a process of its own because it may need seconds and much memory.
"""

import os
import sys

sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from cpulaunch.trace.files import main

sys.exit(main())
