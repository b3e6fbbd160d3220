"""The part of cpulaunch that runs in a rank's program, on top of torch.

``prepare``, ``distributed`` and ``accumulate`` are for scripts that call cpulaunch.  ``change`` alters what a
script does, and ``observe`` only records it; ``autoload`` installs both when a script imports torch.
"""
