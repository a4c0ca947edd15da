"""The object tier on a server of its own, or on the one that `KVTIER_S3_ENDPOINT` names."""

import base64
import uuid

from kvtier.backend import OffloadKey, chunk_hash
from kvtier_backends.object.bucket import SEAL_NAME
from tests.object.servers import MotoServer, S3Server
from tests.remote.outcomes import Fault
from tests.remote.remotes import Held, ServerRemote, Stored
from tests.remote.servers import Proxy

TIMEOUT_S = 2.0
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "kvtier-test", "AWS_SECRET_ACCESS_KEY": "not-a-secret"}
NOT_OURS = dict.fromkeys((Fault.HUNG, Fault.KILLED, Fault.RESTARTED), "the server of KVTIER_S3_ENDPOINT is not ours")


class Objects(Stored):
    def __init__(self, server, bucket):
        self._server, self._bucket = server, bucket
        self._names: dict[OffloadKey, str] = {}

    def name(self, key):
        if key not in self._names:
            (self._names[key],) = [name for name in self._server.names(self._bucket) if chunk_hash(key).hex() in name]
        return self._names[key]

    def held(self, key):
        if self.name(key) not in self._server.names(self._bucket):
            return None
        body, metadata = self._server.get(self._bucket, self.name(key))
        return Held(body, base64.b64decode(metadata[SEAL_NAME]))

    def plant(self, key, held):
        """Replace an object. Another program's has no metadata of ours: a seal of zeros stands for it."""
        metadata = {SEAL_NAME: base64.b64encode(held.seal).decode()} if held.seal.strip(b"\0") else {}
        self._server.put(self._bucket, self.name(key), held.row, metadata)


class ObjectRemote(ServerRemote):
    name = "object"
    forgets_absences = {"absent_ttl_s": "10ms"}  # noqa: RUF012

    def __init__(self, folder):
        self.bucket = f"kvtier-{uuid.uuid4().hex}"
        outside = S3Server.outside()
        self._ours = MotoServer(folder, CREDENTIALS) if outside is None else None
        self.lacks = {} if outside is None else NOT_OURS
        self.server = self._ours or outside
        self._begin()
        self.stored = Objects(self.server, self.bucket)
        self._credentials = self.server.write_credentials(folder / "credentials")
        self.proxy = Proxy(self.server.port)

    def tier(self, *, by_proxy=False, quick=True):
        endpoint = f"http://{self.proxy.address}" if by_proxy else self.server.endpoint
        times = {"timeout_s": TIMEOUT_S} if quick else {}
        where = {"url": f"s3://{self.bucket}/suite", "endpoint": endpoint, "credentials_file": self._credentials}
        return {"type": "object", "codec": self.codec, **where, **times}

    def start(self):
        """Start it again; whoever comes by the proxy finds it with its bucket, or not at all."""
        self._begin()
        self.proxy.listen()

    def _begin(self):
        if self._ours is not None:
            self._ours.start()
        self.server.client.create_bucket(Bucket=self.bucket)

    def kill(self):
        assert self._ours is not None
        self.proxy.refuse()
        self._ours.kill()

    def end(self):
        self.proxy.end()
        if self._ours is None:
            self.server.remove_bucket(self.bucket)
        else:
            self._ours.kill()  # It keeps nothing.
