"""The launcher's port for agents and observers, and the registry of running jobs."""
