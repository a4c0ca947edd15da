from tests.tools.replay.conftest import traces

__all__ = ["traces"]
