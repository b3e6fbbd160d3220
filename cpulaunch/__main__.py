from cpulaunch.cli.main import entry

entry()
