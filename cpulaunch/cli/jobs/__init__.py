"""Commands that show running and ended jobs."""
