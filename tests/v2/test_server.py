"""`draftsmith serve` with the client `openai`, the engine on the second runner."""

from tests.integration.test_server import served, test_serve  # noqa: F401 (runs here too)
