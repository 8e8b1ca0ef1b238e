"""Documentation that is generated from the table of ops and kernels and from recorded evidence."""

from kernel_pytorch.documentation.support import Status, Support, support_table

__all__ = ["Status", "Support", "support_table"]
