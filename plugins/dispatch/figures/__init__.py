"""The figure of what controllers cost."""

FIGURES = ("dispatch_ceiling",)
