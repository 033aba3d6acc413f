"""One command over many processes or machines. The rooms before it know processes only as `parallel.processes`."""
