"""Telemetry rows, and the metrics that programs print.  Pure, except for the sinks."""
