"""The engine behind a server: its thread, its replicas, admission, and encoders."""
