"""Messages of large operations over TCP, moved by a compiled function; see ``relay``."""
