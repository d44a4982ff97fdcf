"""``totalreduce plan``: training steps on machines that one does not have, in virtual time.

``plan.py`` is the command. A trace (``traces.py``) says when gradients are ready; ``recording.py`` records one.
``traffic.py`` records what sparse methods and strategies send, ``simulation.py`` trains in virtual time, and
``prediction.py`` extrapolates to more ranks. ``machines.py`` describes hosts, ``calibration.py`` measures what messages
cost.
"""
