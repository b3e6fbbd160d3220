"""The spawner of the launcher ssh.  It starts the agents of its host, and spawners on further hosts."""
