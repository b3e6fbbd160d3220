"""Documents for queues, as text.  Pure."""
