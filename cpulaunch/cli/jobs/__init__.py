"""Commands about running and ended jobs."""
