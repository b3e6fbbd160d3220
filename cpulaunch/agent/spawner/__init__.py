"""The spawner of the launcher ssh.  On each host, it starts the agents, and spawners on further hosts."""
