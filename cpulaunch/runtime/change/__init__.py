"""Changes of a script: backend, precision, optimizer, and the libraries that it uses."""
