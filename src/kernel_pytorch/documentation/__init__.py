"""Documentation that is generated from the op registry and from records."""

from kernel_pytorch.documentation.support import Status, Support, support_table

__all__ = ["Status", "Support", "support_table"]
