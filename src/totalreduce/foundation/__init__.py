"""What all other floors share: errors, types, header, settings. It uses no torch, no thread and no socket."""
