"""How the agent observes the program: its ledger, stacks, memory and CPU time."""
