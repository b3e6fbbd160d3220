"""The script that the launcher ssh starts on this host, and that ssh starts on every other host::

    python -I -S …/run_spawner.py SSH HOSTS READER [-x NAME]… -- AGENT…   on the launching host
    python -I -S …/run_spawner.py                                         elsewhere; stdin carries the rest

It is short because Python compiles the main script anew each time, while imported modules are cached.
"""

import os
import sys

sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from cpulaunch.agent.spawner.start import main

os._exit(main(sys.argv[1:]))
