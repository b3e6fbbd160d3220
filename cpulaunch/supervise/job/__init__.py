"""The state machine of an attempt: events in, actions out.  Pure."""
