from enum import Enum

class KVConnectorRole(Enum):
    SCHEDULER = 0
    WORKER = 1
