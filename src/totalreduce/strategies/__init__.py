"""Strategies: ways of agreeing that do not exchange all gradients in every step.

``strategy`` has the interface. ``averaging`` averages parameters now and then; ``outer`` averages updates and applies
them with an optimizer of its own (DiLoCo, SlowMo); ``easgd`` pulls the ranks to a common centre; ``gossip`` averages
with one other rank at a time; ``strom`` sends few elements of updates. All are plain objects without threads, sockets
and clocks: ``pytorch/local_steps.py`` carries their exchanges out beside training, ``testing/strategies.py`` in one
process. See docs/design/0016-strategies.md.
"""
