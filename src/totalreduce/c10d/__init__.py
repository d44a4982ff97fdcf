"""The back end of ``torch.distributed`` that is called ``totalreduce``.

``registration`` makes the name known without importing torch; ``backend`` builds a process group when
``init_process_group`` or ``new_group`` asks for one; ``process_group`` is what torch and its users then call.
"""
