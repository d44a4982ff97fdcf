"""The name under which torch knows the back end."""

__all__ = ["BACKEND_NAME"]

BACKEND_NAME = "totalreduce"
