"""The script that every launcher starts: ``python -I -S …/run_agent.py -- PROGRAM ARGS``.

It is short because Python compiles the main script anew each time, while imported modules are cached.
``-I -S`` keep the user's modules, variables and .pth files out, so the path of cpulaunch is added here.
"""

import gc
import os
import sys

gc.disable()  # saves 2 ms while starting; the agent enables it again before its loop
sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from cpulaunch.agent.loop import main  # noqa: E402

# Skip Python's own shutdown, which would take as long as the start.
os._exit(main())
