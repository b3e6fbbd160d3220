"""The file that every launcher starts: ``python -I -S …/run_agent.py -- PROGRAM ARGS``.

Short, because Python compiles the file that it is told to run anew each time; the rest comes compiled.
``-I -S`` keep the user's modules, variables and .pth files out, so our own place must be said.
"""

import gc
import os
import sys

gc.disable()  # 2 ms of a start in which next to nothing is garbage; the agent enables it once it waits
sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from cpulaunch.agent.loop import main  # noqa: E402

# Nothing is left to do then, and tearing Python down would take as long as all the above.
os._exit(main())
