"""Launch, watch, stop and end the processes of a run on several devices."""
