"""The file by which the agent runs a Python program: ``… train.py ARGS``, or ``… -m module ARGS``.

Short, because Python compiles the file that it is told to run anew each time; the rest comes compiled.
"""

import os
import sys

# Python put this file's directory first on the path (unless -P), where the program's belongs.
if sys.path and os.path.abspath(sys.path[0]) == os.path.dirname(os.path.abspath(__file__)):
    del sys.path[0]

from cpulaunch.agent.program.bootstrap import main

main()
