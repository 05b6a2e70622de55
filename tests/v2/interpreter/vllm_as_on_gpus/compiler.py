"""What Triton asks of a compiler before it knows that it needs none."""

from typing import Any

from triton.backends.compiler import BaseBackend


class InterpretedBackend(BaseBackend):
    binary_ext = ""

    @staticmethod
    def supports_target(target: Any) -> bool:
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        return "interpreted"

    def parse_options(self, options: dict[str, Any]) -> Any:
        raise NotImplementedError(_UNUSED)

    def add_stages(self, *arguments: Any, **named: Any) -> None:
        raise NotImplementedError(_UNUSED)

    def load_dialects(self, context: Any) -> None:
        raise NotImplementedError(_UNUSED)

    def get_module_map(self) -> dict[str, Any]:
        raise NotImplementedError(_UNUSED)


_UNUSED = "A Triton kernel was to be compiled for a CPU. Set TRITON_INTERPRET=1 before Triton is imported."
