"""Words everybody shares. Standard library only; no thread, no socket, no torch."""
