"""Metrics over HTTP, for tests that read them as Prometheus does."""

from contextlib import contextmanager

from prometheus_client import start_http_server


@contextmanager
def served(registry):
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
