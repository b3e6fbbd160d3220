"""Changes of torch and of libraries, which give a script the planned backend, precision and optimizer."""
