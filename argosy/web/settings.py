"""Settings that every server has. No jax here: mistakes are answered before it is imported."""

from pydantic import Field

from argosy.core.settings import Settings


class WebLimits(Settings):
    """Limits on one client and on all clients together. A request beyond one gets 400, 408, 413, 431, 503 or 504, with the reason."""

    body: int = Field(2_097_152, gt=0)
    """Limit of a request body in bytes. Multiplied by `connections`, it bounds the memory of all bodies."""
    headers: int = Field(64, gt=0)
    """Limit of the number of headers in a request; together they may have 32 kB."""
    connections: int = Field(512, gt=0)
    """Limit of open connections."""
    seconds: float = Field(600, gt=0)
    """Limit of a request in seconds, from its arrival to its last byte."""
    upload_seconds: float = Field(30, gt=0)
    """Limit in seconds for the body of a request to arrive."""


class WebSettings(Settings):
    """The address of a server, and the clients that it admits."""

    host: str = "127.0.0.1"
    """Address to listen on. An address other than loopback needs an `api_key`, or `open=true`."""
    port: int = Field(8000, ge=0, lt=2**16)
    """Port to listen on; 0 takes a free one."""
    api_key: str | None = None
    """Key that clients must send, as `Authorization: Bearer KEY` or `x-api-key: KEY`. Default: $ARGOSY_API_KEY, which other users of
    the machine cannot read from the list of processes."""
    open: bool = False
    """Lets everyone who can reach the address use the server without a key."""
    tls_certificate: str | None = None
    """PEM file of the server's certificate chain; the server then speaks HTTPS only."""
    tls_key: str | None = None
    """PEM file of the certificate's key."""
    drain: float = Field(30, ge=0)
    """Seconds for running requests to finish after SIGTERM."""
    log_requests: bool = False
    """Prints one line per request on stderr: path and status, never content."""
    limits: WebLimits = WebLimits()
