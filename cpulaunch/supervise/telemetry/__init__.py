"""Rows of telemetry, and the figures that programs print.  Pure, except for the sinks."""
