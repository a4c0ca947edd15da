"""Real S3 servers on free ports of this machine, and what a test does to a bucket from outside."""

import os
import sys

import boto3
import botocore.config
from botocore.exceptions import BotoCoreError, ClientError

from tests.remote.servers import PATIENCE_S, OneServer, ServerProcess, free_port, until

# Only S3, and without a log: for each request `moto.server` lists a folder, under a lock.
SERVES = """
import logging, sys
from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple

def serve(environ, start_response, s3=create_backend_app("s3"), own=create_backend_app("moto_api")):
    return (own if environ["PATH_INFO"].startswith("/moto-api/") else s3)(environ, start_response)

logging.getLogger("werkzeug").setLevel("ERROR")
run_simple("127.0.0.1", int(sys.argv[1]), serve, threaded=True, request_handler=MotoRequestHandler)
"""


class S3Server:
    """A server, and a client with all rights there. `KVTIER_S3_ENDPOINT` names one that runs already."""

    page_keys = 1_000

    def __init__(self, endpoint, credentials):
        self.endpoint, self.port = endpoint, int(endpoint.rpartition(":")[2])
        self.access_key, self.secret_key = (
            credentials[f"AWS_{name}"] for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY")
        )
        self.client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name="us-east-1",
            config=botocore.config.Config(
                s3={"addressing_style": "path"},
                connect_timeout=PATIENCE_S,
                read_timeout=PATIENCE_S,
                retries={"max_attempts": 0},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )

    @classmethod
    def outside(cls):
        """Return the one that the environment names: endpoint, and its keys under AWS's own names."""
        if (endpoint := os.environ.get("KVTIER_S3_ENDPOINT")) is None:
            return None
        return cls(endpoint, os.environ)

    def write_credentials(self, path):
        path.write_text(
            f"[default]\naws_access_key_id = {self.access_key}\naws_secret_access_key = {self.secret_key}\n"
        )
        path.chmod(0o600)
        return str(path)

    def names(self, bucket, prefix=""):
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return [about["Key"] for page in pages for about in page.get("Contents", [])]

    def get(self, bucket, name):
        found = self.client.get_object(Bucket=bucket, Key=name)
        return found["Body"].read(), found["Metadata"]

    def put(self, bucket, name, body, metadata=None):
        self.client.put_object(Bucket=bucket, Key=name, Body=body, Metadata=metadata or {})

    def remove(self, bucket, *names):
        for start in range(0, len(names), 1_000):
            some = [{"Key": name} for name in names[start : start + 1_000]]
            self.client.delete_objects(Bucket=bucket, Delete={"Objects": some, "Quiet": True})

    def remove_bucket(self, bucket):
        self.remove(bucket, *self.names(bucket))
        self.client.delete_bucket(Bucket=bucket)


class MotoServer(OneServer, S3Server):
    """moto's server, in a process that ends with this one. It keeps nothing when it ends."""

    page_keys = 50  # A list has several pages with few objects.

    def __init__(self, folder, credentials, port=None):
        super().__init__(f"http://127.0.0.1:{port or free_port()}", credentials)
        self._log = folder / f"moto-{self.port}.log"

    def start(self):
        command = [sys.executable, "-c", SERVES, str(self.port)]
        self._process = ServerProcess(command, self._log, {"MOTO_S3_DEFAULT_MAX_KEYS": str(self.page_keys)})
        until(self._answers)
        return self

    def _answers(self):
        assert self._process is not None
        self._process.check()
        try:
            self.client.list_buckets()
        except ClientError:  # It wants other credentials: it answers.
            return True
        except BotoCoreError:
            return False
        return True
