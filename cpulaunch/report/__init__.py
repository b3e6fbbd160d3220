"""A job's report: one HTML file made of what its directory holds."""
