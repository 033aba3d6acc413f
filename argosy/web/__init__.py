"""What every server of this house has: errors, checks of requests, bodies, addresses, a process that drains."""
