"""The script that the agent starts for a Python program: ``… train.py ARGS`` or ``… -m module ARGS``.

It is short because Python compiles the main script anew each time, while imported modules are cached.
"""

import os
import sys

# Unless -P is set, Python has put this file's directory on the path.  The bootstrap adds the program's.
if sys.path and os.path.abspath(sys.path[0]) == os.path.dirname(os.path.abspath(__file__)):
    del sys.path[0]

from cpulaunch.agent.program.bootstrap import main

main()
