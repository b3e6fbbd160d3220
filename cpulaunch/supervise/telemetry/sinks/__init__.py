"""Where rows of telemetry go."""
