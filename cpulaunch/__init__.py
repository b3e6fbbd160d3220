"""cpulaunch: run PyTorch training on CPU clusters.

Importing this package is cheap and never imports torch: the launcher and the keeper depend on it.
"""

__version__ = "0.1.0"
