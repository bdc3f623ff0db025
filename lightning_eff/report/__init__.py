"""Numbers: time, bytes, FLOPs, and the tables that show them."""
