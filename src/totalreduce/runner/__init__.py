"""Threads and a lock around the engine: ``runner`` has the threads, ``endpoint`` the lock, ``turns`` the hand-over.

The engine (``engine/``) is a plain object; this package is where it meets a transport, a clock and several threads.
"""
