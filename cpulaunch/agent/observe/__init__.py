"""The agent's view of the program: its ledger, stacks, memory and CPU time."""
