"""What operators see and do, over HTTP."""
