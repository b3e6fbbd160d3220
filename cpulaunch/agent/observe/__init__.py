"""What the agent sees of the program: ledger, stacks, memory, CPU time."""
