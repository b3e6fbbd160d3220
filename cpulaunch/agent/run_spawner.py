"""The file that the launcher ssh starts here, and ssh on every other host::

    python -I -S …/run_spawner.py SSH HOSTS READER [-x NAME]… -- AGENT…   on the launching host
    python -I -S …/run_spawner.py                                         elsewhere, told the rest by stdin

Short, because Python compiles the file that it is told to run anew each time; the rest comes compiled.
"""

import os
import sys

sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from cpulaunch.agent.spawner.start import main

os._exit(main(sys.argv[1:]))
