"""Commands about jobs that run or have run."""
