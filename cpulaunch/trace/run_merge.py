"""``python -I -S …/run_merge.py``: merges traces in the working directory, as a JSON object on stdin says.

This is a process of its own, because it may take seconds and much memory, and must not block the launcher.
"""

import os
import sys

sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from cpulaunch.trace.files import main

sys.exit(main())
