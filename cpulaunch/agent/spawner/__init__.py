"""The launcher ssh at work: a spawner on each host starts the agents there, and spawners on further hosts."""
